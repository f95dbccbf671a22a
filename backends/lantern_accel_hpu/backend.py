"""A Gaudi as a device: the reference operations on it, its clock and its meters.

Written from the API that habana_frameworks documents and, for version 1.19, shows in its source;
not yet run on a Gaudi.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch

from lantern_accel.backend import Backend, DeviceFacts, MemoryUse, Stopwatch, Support
from lantern_accel.errors import BackendError

COUNTERS = ("graph_compilation", "cpu_fallback", "recipe_cache")


class DeviceBackend(Backend):
    """One Gaudi that torch drives as ``hpu``."""

    name = "hpu"
    version = "0.1.0"

    def __init__(self, index: int) -> None:
        self._hpu = _import_bridge()
        count = int(self._hpu.device_count())
        if index >= count:
            raise BackendError(
                f"backend 'hpu' failed in open: the bridge gives this process {count} of the "
                "devices that the driver shows; check with hl-smi that no other process holds "
                "them, and HABANA_VISIBLE_MODULES"
            )
        super().__init__(torch.device("hpu", index))

    def facts(self) -> DeviceFacts:
        """Describe the Gaudi and the bridge."""
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=str(self._hpu.get_device_name()),
            torch=torch.__version__,
            vendor="Intel",
            memory_bytes=self.memory().limit,
            sdk=_bridge_version(),
            notes=(f"mode: {_mode()}",),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first; float16 is left out, because Gaudi's serving stacks refuse it."""
        return (torch.bfloat16, torch.float32)

    def support(self, capability: str) -> Support:
        """Steps run eagerly so far."""
        if capability == "capture":
            return Support(False, "backend 'hpu' does not compile or record graphs yet")
        return super().support(capability)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._hpu.synchronize()

    def stopwatch(self) -> Stopwatch:
        """Measure between two events on the current stream, without the host's share."""
        return _EventStopwatch(self._hpu)

    def memory(self) -> MemoryUse:
        """Read the bridge's memory statistics."""
        stats = self._hpu.memory_stats()
        return MemoryUse(
            in_use=stats.get("InUse"), peak=stats.get("MaxInUse"), limit=stats.get("Limit")
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak of the bridge's statistics."""
        self._hpu.reset_peak_memory_stats()

    def counters(self) -> dict[str, int]:
        """Read how often the bridge compiled, fell back to the CPU, and missed its cache.

        After warm-up none of them may rise.
        """
        found: dict[str, int] = {}
        with contextlib.suppress(ImportError):
            from habana_frameworks.torch.hpu import metrics

            for name in COUNTERS:
                metric = metrics.metric_global(name)
                if metric is None:  # this version of the bridge does not count it
                    continue
                for key, value in metric.stats():
                    if isinstance(value, int):
                        found[f"{name}.{key}"] = value
        return found


class _EventStopwatch(Stopwatch):
    def __init__(self, hpu: Any) -> None:
        super().__init__(hpu.synchronize)
        self._from = hpu.Event(enable_timing=True)
        self._to = hpu.Event(enable_timing=True)

    def __enter__(self) -> Stopwatch:
        self._synchronize()
        self._from.record()
        return self

    def __exit__(self, *exc: object) -> None:
        self._to.record()
        self._to.synchronize()
        self.seconds = float(self._from.elapsed_time(self._to)) / 1000


def _import_bridge() -> ModuleType:
    """Import Habana's bridge, which registers ``hpu`` with torch."""
    import habana_frameworks.torch  # noqa: F401, registers the device
    import habana_frameworks.torch.hpu as hpu

    module: ModuleType = hpu
    return module


def _bridge_version() -> str | None:
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"habana-torch-plugin {importlib.metadata.version('habana-torch-plugin')}"
    return None


def _mode() -> str:
    from habana_frameworks.torch.utils.internal import is_lazy

    return "lazy" if is_lazy() else "eager"
