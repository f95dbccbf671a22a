"""XLA as a device: lazy tensors, compiled programs, and the runtime's own counts.

It has run on PJRT's CPU client. It has not run on a TPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend, Conformance, DeviceFacts, MemoryUse, Support
from lantern_accel.device.capture import HostCopy, Replay, buffers_of
from lantern_accel.device.kv_cache import KVLayout
from lantern_accel.device.noise import exponential
from lantern_accel.device.preferences import Preferences
from lantern_accel.errors import BackendError
from lantern_accel_xla import faults
from lantern_accel_xla.copies import Snapshots
from lantern_accel_xla.options import Options
from lantern_accel_xla.programs import Program, Traced
from lantern_accel_xla.runtime import Runtime


class DeviceBackend(Backend):
    """One device of a PJRT client, which torch drives as ``xla``."""

    name = "xla"
    version = "0.1.0"

    def __init__(self, runtime: Runtime, options: Options | None = None) -> None:
        super().__init__(runtime.device)
        self.runtime = runtime
        self.options = options or Options()
        # A compiler's arena and its code for one engine's programs.
        self.preferences = Preferences(
            default_batch=1 if runtime.client == "CPU" else 8, runtime_bytes=1500 * 10**6
        )
        self._copied: list[weakref.ref[Tensor]] = []
        self._replays: weakref.WeakSet[Replay] = weakref.WeakSet()
        self._capturing = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase; an uncaptured step is launched when its last phase ends.

        So every such step is one program too: without an end, a lazy device traces all steps of an
        image into one.
        """
        with super().phase(name):
            if name == "draft" and not self._capturing:
                self.runtime.sync()  # the prefill, or what loading a request left
            yield
        if not self._capturing and (name == "commit" or self.listener is not None):
            self.runtime.sync()

    def host_copy(self, source: Tensor) -> HostCopy:
        """Read ``source`` a step late, from the memory that it then had.

        Best called before steps that change it are captured; they then leave that memory alone.
        """
        self._copied = [one for one in self._copied if one() is not None]
        self._copied.append(weakref.ref(source))
        programs = [one for one in self._replays if isinstance(one, Program)]
        donated = any(id(source) in one.donors for one in programs)
        return Snapshots(source, self.runtime, donated=donated)

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        """Order caches by head: a head's keys are one matrix, which products take as it is."""
        return KVLayout(layers, rows, capacity, heads, head_dim, dtype, head_major=True)

    def facts(self) -> DeviceFacts:
        """Describe the client and its device."""
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=f"{self.runtime.kind()} through XLA",
            torch=torch.__version__,
            memory_bytes=self.memory().limit,
            sdk=f"torch_xla {self.runtime.version}",
            notes=(f"PJRT client: {self.runtime.client}", f"mode: {self.options.mode}"),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first, but on the CPU client, which widens it."""
        if self.runtime.client == "CPU":
            return (torch.float32, torch.bfloat16)
        return (torch.bfloat16, torch.float32)

    def support(self, capability: str) -> Support:
        """Steps are compiled programs, except in the mode ``eager``."""
        if capability == "capture":
            if self.options.mode == "eager":
                return Support(False, "the mode 'eager' captures nothing")
            return Support(True, how="traced" if self.options.mode == "lazy" else "compiled")
        return super().support(capability)

    def conformance(self) -> Conformance:
        """Refuse operators that run on the host; check programs' text, donation, transfers, one graph."""
        from lantern_accel_xla.checks import CHECKS

        # What the CPU client has compiled stays mapped, and Linux gives a process 65,530 mappings.
        apart = frozenset({"replay"} if self.runtime.client == "CPU" else ())
        return Conformance({"operators": find_unlowered}, CHECKS, apart)

    def inference(self) -> AbstractContextManager[object]:
        """Return ``no_grad``: in inference mode torch_xla makes no views of tensors from outside."""
        return torch.no_grad()

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Compile ``step`` as one program, as the mode says."""
        if self.options.mode == "eager":  # traced and launched at each call, with nothing checked

            def run() -> None:
                step()
                self.runtime.sync()

            return Replay(run)

        def quiet() -> None:
            with self.capturing():
                step()

        with self.inference():
            if self.options.mode == "lazy":
                replay: Replay = Traced(self.runtime, quiet, name)
            else:
                kept = [one for one in (ref() for ref in self._copied) if one is not None]
                replay = Program(self.runtime, quiet, name, buffers_of(step).values(), kept)
        self._replays.add(replay)
        return replay

    def snapshot(self, buffer: Tensor) -> Tensor:
        """Copy a buffer to memory of its own, which a clone would share.

        torch_xla lets a copy and its source have one memory, and a write to either give it away.
        """
        return torch.maximum(buffer, buffer)

    def noise(self, keys: Tensor, positions: Tensor, codes: int) -> Tensor:
        """As the reference's bits, with shifts and products that XLA leaves as they are meant."""
        return exponential(keys, positions, codes, shift_right, round_product)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Let no phase of the block launch anything: the whole block is one program."""
        before, self._capturing = self._capturing, True
        try:
            yield
        finally:
            self._capturing = before

    def flush(self) -> None:
        """Launch what was traced."""
        self.runtime.sync()

    def synchronize(self) -> None:
        """Launch what was traced, and wait for all that was launched."""
        try:
            self.runtime.sync(wait=True)
            self.runtime.wait()
        except RuntimeError as error:
            raise self.explain(error) or error from error

    def explain(self, error: Exception) -> BackendError | None:
        """Say what an error of the runtime means and what to do."""
        return faults.explain(error, "decoding")

    def memory(self, new_peak: bool = False) -> MemoryUse:
        """Read the client's statistics, where it has any."""
        found = self.runtime.memory()
        return MemoryUse(
            in_use=found.get("bytes_used"),
            peak=found.get("peak_bytes_used"),
            limit=found.get("bytes_limit"),
            definition="what the PJRT client counts as in use",
        )

    def counters(self) -> dict[str, int]:
        """Read the runtime's counts of compilations and of operators that ran on the host.

        Transfers are counted too (:meth:`Runtime.metrics`), but a request may make them.
        """
        self.synchronize()
        found = self.runtime.metrics()
        return {name: found[name] for name in ("compilations", "fallbacks")}

    def close(self) -> None:
        """Release what was captured."""
        for replay in list(self._replays):
            replay.release()


def shift_right(words: Tensor, by: int) -> Tensor:
    """Shift 32-bit words to the right, the sign kept.

    PyTorch/XLA divides in place of shifting, which rounds negative words the other way: bits that would
    fall out are cleared first.
    """
    return (words & -(1 << by)) >> by


def round_product(a: Tensor, b: Tensor | float) -> Tensor:
    """Multiply numbers whose product is below 64, and round it to float32 before anything is added.

    XLA's CPU client contracts a product and a sum into one operation, which rounds once; an optimization
    barrier between the two changes nothing there. A comparison needs the product's own value.
    """
    return (a * b).clamp(max=64.0)


def find_unlowered(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of an operator that neither torch_xla lowers nor torch makes of others."""
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    if name.startswith("prim::"):  # a question to torch, such as on which device a tensor is
        return ""
    composite = ("", "NonFunctional")
    keys = ["XLA", "CompositeImplicitAutograd"]
    keys += [f"CompositeExplicitAutograd{end}" for end in composite]
    return "" if any(has(name, key) for key in keys) else "torch_xla runs it on the host"
