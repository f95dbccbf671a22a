"""A device of torch's: the reference operations, recorded where torch has graphs for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from lantern_accel.device.backend import Backend, DeviceConditions, DeviceFacts, MemoryUse, Support
from lantern_accel.device.capture import Replay
from lantern_accel.errors import BackendError, DeviceMemoryError
from lantern_accel_torch import asked, graphs
from lantern_accel_torch.accelerator import Accelerator
from lantern_accel_torch.meters import PowerMeter


class DeviceBackend(Backend):
    """One device that torch knows and nobody else claims."""

    name = "torch"
    version = "0.1.0"

    def __init__(self, index: int, accelerator: Accelerator) -> None:
        super().__init__(accelerator.device(index))
        self._accelerator = accelerator
        self._place = index
        self._meter: PowerMeter | None = None
        self._dtypes = asked.dtypes(self.device)
        self.index = asked.index(self.device)
        self._views = asked.views_in_inference_mode(self.device)
        self._recorder: graphs.Recorder | None = None
        self._eager = ""
        self.record_steps()

    def record_steps(self, *, unless: str = "") -> None:
        """Record steps from now on where torch has graphs for the device; ``unless``: why not."""
        make = unless or graphs.maker(self._accelerator)
        self._recorder, self._eager = None, make if isinstance(make, str) else ""
        if not isinstance(make, str):
            self._recorder = graphs.Recorder(self._accelerator, self.device, make)

    def facts(self) -> DeviceFacts:
        """Describe the device as far as torch does."""
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=self._accelerator.name(self._place),
            torch=torch.__version__,
            memory_bytes=self.memory().limit,
            driver=self._accelerator.driver(self._place),
            notes=(
                f"indices: {str(self.index).removeprefix('torch.')}",
                f"steps: operator by operator, {self._eager}" if self._eager else "steps: recorded",
            ),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes in which the device gave right products when it was asked."""
        return self._dtypes

    def support(self, capability: str) -> Support:
        """Answer for steps, which are recorded where torch has graphs for the device."""
        if capability == "capture":
            return Support(not self._eager, self._eager, "" if self._eager else "recorded")
        return super().support(capability)

    def inference(self) -> AbstractContextManager[object]:
        """Return torch's inference mode where the device makes views in it, else without gradients."""
        return torch.inference_mode() if self._views else torch.no_grad()

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Record ``step`` where torch has graphs for the device; raises NotCapturableError."""
        return Replay(step) if self._recorder is None else self._recorder.capture(step, name)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._accelerator.synchronize(self.device)

    def explain(self, error: Exception) -> BackendError | None:
        """Say what to do about memory that ran out and operators that are missing."""
        text = " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
            return DeviceMemoryError(
                f"{self.device} ran out of memory ({text[:200]}); decode a smaller batch with "
                "--batch, or use --dtype bfloat16"
            )
        if isinstance(error, NotImplementedError):  # torch's, for an operator without a kernel
            return BackendError(
                f"torch lacks an operator on {self.device} ({text[:200]}); use a newer torch or another "
                "device"
            )
        return None

    def memory(self, new_peak: bool = False) -> MemoryUse:
        """Read what torch's allocator holds in tensors, where it tells."""
        read = self._accelerator.reading
        limit = read(self.device, "recommended_max_memory")
        peak = read(self.device, "max_memory_allocated")
        if new_peak:
            with contextlib.suppress(Exception):  # where torch can
                torch.accelerator.reset_peak_memory_stats(self.device)
        free = None
        with contextlib.suppress(Exception):  # since torch 2.10, and not for every kind
            free, limit = map(int, torch.accelerator.get_memory_info(self.device))
        return MemoryUse(
            in_use=read(self.device, "memory_allocated", "current_allocated_memory"),
            peak=peak,
            limit=limit,
            free=free,
            definition="what torch's allocator holds in tensors on the device",
        )

    def conditions(self) -> DeviceConditions:
        """Read the power that the device draws, where torch tells it."""
        return DeviceConditions(power_w=self._accelerator.watts(self.device))

    def energy_mj(self) -> int | None:
        """Add up the power that the device draws, where torch tells it; a thread reads it."""
        watts = partial(self._accelerator.watts, self.device)
        if self._meter is None and watts() is not None:
            self._meter = PowerMeter(watts)
        return None if self._meter is None else self._meter.millijoules()

    def close(self) -> None:
        """Stop the meter, release recordings, and let the allocator give back what it keeps."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None
        if self._recorder is not None:
            self._recorder.close()
        with contextlib.suppress(Exception):  # not every kind has it
            self._accelerator.module.empty_cache()
