"""A GPU as a device: the reference operations on it, its clock and its meters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from lantern_accel.backend import Backend, DeviceFacts, MemoryUse, Stopwatch, Support


class DeviceBackend(Backend):
    """One GPU that torch drives as ``cuda``."""

    name = "cuda"
    version = "0.1.0"

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index))
        self._meter = _nvml_handle(index)

    def facts(self) -> DeviceFacts:
        """Describe the GPU, its driver and torch's CUDA."""
        gpu = torch.cuda.get_device_properties(self.device)
        is_amd = torch.version.hip is not None
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=gpu.name,
            torch=torch.__version__,
            vendor="AMD" if is_amd else "NVIDIA",
            architecture=f"compute capability {gpu.major}.{gpu.minor}",
            memory_bytes=gpu.total_memory,
            cores=gpu.multi_processor_count,
            driver=_driver_version(),
            sdk=f"ROCm {torch.version.hip}" if is_amd else f"CUDA {torch.version.cuda}",
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first from Ampere on; older GPUs only emulate it, so float16 there."""
        if torch.version.hip is not None or torch.cuda.get_device_capability(self.device) >= (8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    def support(self, capability: str) -> Support:
        """Steps run eagerly so far."""
        if capability == "capture":
            return Support(False, "backend 'cuda' does not record CUDA graphs yet")
        return super().support(capability)

    def synchronize(self) -> None:
        """Wait for all streams of this GPU."""
        torch.cuda.synchronize(self.device)

    def stopwatch(self) -> Stopwatch:
        """Measure between two events on the current stream, without the host's share."""
        return _EventStopwatch(self.device)

    def memory(self) -> MemoryUse:
        """Read what torch's allocator holds in tensors on this GPU."""
        return MemoryUse(
            in_use=torch.cuda.memory_allocated(self.device),
            peak=torch.cuda.max_memory_allocated(self.device),
            limit=torch.cuda.get_device_properties(self.device).total_memory,
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak of the allocator."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def counters(self) -> dict[str, int]:
        """Read the allocator's retries and out-of-memory errors; both should stay 0."""
        stats = torch.cuda.memory_stats(self.device)
        return {name: int(stats.get(name, 0)) for name in ("num_alloc_retries", "num_ooms")}

    def energy_mj(self) -> int | None:
        """Read the GPU's energy meter, if nvidia-ml-py is installed and the GPU has one."""
        if self._meter is None:
            return None
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._meter))
        return None


class _EventStopwatch(Stopwatch):
    def __init__(self, device: torch.device) -> None:
        super().__init__(lambda: torch.cuda.synchronize(device))
        self._device = device
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch leaves it untyped
        self._from = event(enable_timing=True)
        self._to = event(enable_timing=True)

    def __enter__(self) -> Stopwatch:
        self._synchronize()
        self._from.record(torch.cuda.current_stream(self._device))
        return self

    def __exit__(self, *exc: object) -> None:
        self._to.record(torch.cuda.current_stream(self._device))
        self._to.synchronize()
        self.seconds = self._from.elapsed_time(self._to) / 1000


def _nvml_handle(index: int) -> Any | None:
    """Return NVML's handle of torch's device ``index``, matched by UUID; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        pynvml.nvmlInit()
        # NVML ignores CUDA_VISIBLE_DEVICES, so that its indices are not torch's.
        uuid = torch.cuda.get_device_properties(index).uuid
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return None


def _driver_version() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None
