"""The CPU before it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from lantern_accel.bounds import whole
from lantern_accel.device import host
from lantern_accel.device.compiled import keep_torch
from lantern_accel.device.spec import BackendSpec, Probe
from lantern_accel.errors import show

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


#: What tells OpenMP's makes how their threads wait; the first is the standard's.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class Spec(BackendSpec):
    """The reference device: always there."""

    name = "cpu"
    summary = "the reference, on any processor that torch runs on"
    api_version = 1
    priority = 0

    def __init__(self, native: bool = True) -> None:
        self._native = native

    def configure(self, options: Mapping[str, Any]) -> BackendSpec:
        """Return a spec that knows whether steps will be native."""
        off = str(options.get("native", "auto")) == "off" or str(options.get("compile")) == "on"
        return Spec(native=not off)

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Let what is compiled be kept, and OpenMP's threads sleep while they wait.

        OpenMP reads how to wait when torch is loaded. Awake, its threads hold cores that others want: on
        two shared cores a step by torch's operators took ten times as long. Native steps use no OpenMP,
        so that waking it for text, prompts and pixels costs them nothing; steps by torch's operators call
        it hundreds of times, and keep its own way of waiting. What the user has set stays.
        """
        keep_torch(environ)
        from lantern_accel_cpu.native import build

        if self._native and not any(name in environ for name in WAITING) and not build.missing():
            environ[WAITING[0]] = "passive"

    def probe(self) -> Probe:
        """Describe the processor; it is always available."""
        import torch

        from lantern_accel_cpu.backend import cpu_name, default_dtype
        from lantern_accel_cpu.native.library import describe

        host.limit_threads()
        threads = host.described_threads(torch.get_num_threads())
        return Probe.of_devices(
            f"{cpu_name()}, {threads}, {default_dtype(self._native)}, {describe()}"
        )

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Open the CPU; option ``threads`` sets torch's thread count until it is closed.

        Option ``compile``: ``on``, ``off``, or ``auto``, which compiles a step where a request is so
        long that it is faster. Option ``native``: ``on`` raises where the native kernels cannot be built,
        ``auto`` goes on without them, ``off`` leaves them out; so does ``compile=on``, whose compiler
        cannot look into them.
        """
        from lantern_accel.device.spec import check_options
        from lantern_accel.errors import DeviceRequestError
        from lantern_accel_cpu.backend import DeviceBackend
        from lantern_accel_cpu.native import build, library
        from lantern_accel_cpu.native.backend import NativeCpu
        from lantern_accel_cpu.native.kernels import Kernels

        known = {
            "threads": "how many threads are used",
            "native": "off leaves out the native kernels, on raises where there are none",
            "compile": "on compiles steps with torch.compile, auto where a request is long enough",
        }
        check_options(self.name, options, known)
        compiled, native = (str(options.get(name, "auto")) for name in ("compile", "native"))
        for name, value in (("compile", compiled), ("native", native)):
            if value not in ("auto", "on", "off"):
                raise DeviceRequestError(
                    f"backend 'cpu' got {name}={value!r}; give on, off or auto (the default)"
                )
        if native == "on" and compiled == "on":
            raise DeviceRequestError(
                "backend 'cpu' got native=on and compile=on, and a compiled step has no native kernels; "
                "leave one of them out"
            )
        threads = options.get("threads")
        if threads is not None:
            most = os.cpu_count() or 1
            threads = whole(threads) if isinstance(threads, str) else threads
            if not isinstance(threads, int) or not 1 <= threads <= most:
                raise DeviceRequestError(
                    f"backend 'cpu' got threads={show(options['threads'])}; give a number from 1 to "
                    f"{most}"
                )
        loaded = None
        if native == "on":
            loaded = library.load()
        elif native == "auto" and compiled != "on":
            loaded = library.load_or_warn()
        if loaded is not None:
            return NativeCpu(index, Kernels(loaded), threads)
        backend = DeviceBackend(index, threads, compiled)
        if native == "auto" and (reason := build.missing()):
            backend.slowed = (
                f"without native kernels decoding takes several times as long: {reason}"
            )
        return backend
