"""XLA before it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from lantern_accel.device.spec import BackendSpec, Probe
from lantern_accel_xla import environment

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


class Spec(BackendSpec):
    """Whatever PJRT has a client for, through torch_xla: TPUs, and the CPU to develop on."""

    name = "xla"
    summary = "TPUs, and XLA's own CPU client, through torch_xla"
    api_version = 1
    scheduled_as = "TPU"
    also_known_as = ("tpu", "pjrt", "torch_xla")

    @property
    def priority(self) -> int:  # type: ignore[override]  # here it depends on the machine
        """Ahead of the CPU with a TPU; never automatic with another client."""
        found = environment.client(os.environ, environment.tpu_chips())
        return 10 if found == "TPU" else -1

    def configure(self, options: Mapping[str, Any]) -> BackendSpec:
        """Refuse an option that there is not before torch is imported."""
        from lantern_accel_xla.options import Options

        Options.read(options)
        return self

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Say which PJRT client to use, which torch_xla reads while it is imported."""
        environment.prepare(environ)

    def probe(self) -> Probe:
        """Look for torch_xla, the torch that goes with it, and a client; import none of them."""
        if not environment.is_installed("torch_xla"):
            return Probe.missing("torch_xla is not installed", environment.INSTALL)
        if wrong := environment.mismatch():
            return Probe.missing(wrong, environment.INSTALL)
        chips = environment.tpu_chips()
        found = environment.client(os.environ, chips)
        if found == "TPU":
            if not environment.is_installed("libtpu"):
                return Probe.missing(
                    "PJRT_DEVICE=TPU, and libtpu is not installed", 'pip install "torch_xla[tpu]"'
                )
            if not chips:
                return Probe.missing(
                    "PJRT_DEVICE=TPU, and the kernel shows no TPU chip",
                    "run on a TPU machine, or set PJRT_DEVICE=CPU to try the backend out",
                )
            return Probe.of_devices(*["TPU"] * chips)
        return Probe.of_devices(f"PJRT client {found or 'CPU'}")

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Open device ``index`` of the client; see :mod:`lantern_accel_xla.options` for the options."""
        from lantern_accel_xla.backend import DeviceBackend
        from lantern_accel_xla.options import Options
        from lantern_accel_xla.runtime import Runtime

        chosen = Options.read(options)
        return DeviceBackend(Runtime.from_sdk(index, chosen.cache), chosen)
