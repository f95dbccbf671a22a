"""Clocks and meters: CUDA events, and what NVML (or AMD's amdsmi) tells about the card."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from lantern_accel.device.backend import Stopwatch
from lantern_accel_cuda import faults
from lantern_accel_cuda.handles import event

#: Bytes of a copy and seconds of copies, in which memory reaches the clock that it has in steps.
COPY, LOAD = 2**24, 0.25
#: Bytes that are left free in WSL, where Windows moves a nearly full card's memory to the host's.
WSL_RESERVE = 1_500_000_000


def reserve(release: Path = Path("/proc/sys/kernel/osrelease")) -> int:
    """Return the bytes of a GPU that nothing may take on this system; ``release``: its kernel's name."""
    with contextlib.suppress(OSError):
        if "microsoft" in release.read_text(encoding="utf-8").lower():
            return WSL_RESERVE
    return 0


class EventStopwatch(Stopwatch):
    """Time between two events on the current stream, without the host's share."""

    name = "CUDA events on the current stream"

    def __init__(self, device: torch.device) -> None:
        super().__init__(lambda: torch.cuda.synchronize(device))
        self._device = device
        self._from, self._to = event(timing=True), event(timing=True)

    def __enter__(self) -> Stopwatch:
        self._synchronize()
        self._from.record(torch.cuda.current_stream(self._device))
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:  # after an error the GPU may not answer
            return
        with faults.explain_errors(self._device, "waiting for it"):
            self._to.record(torch.cuda.current_stream(self._device))
            self._to.synchronize()
        self.seconds = self._from.elapsed_time(self._to) / 1000


class Card:
    """One GPU as NVML sees it, or AMD's amdsmi; without their packages every answer is None."""

    def __init__(self, index: int) -> None:
        self._nvml, self._handle = _open(index)
        self._amd = index if torch.version.hip else None

    def _ask(self, question: str, *given: Any) -> Any:
        if self._nvml is None:
            return None
        # A virtual card or an old driver answers some questions and not others.
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            return getattr(self._nvml, question)(self._handle, *given)
        return None

    def energy_mj(self) -> int | None:
        """Millijoules since the driver was loaded."""
        if self._amd is not None:
            return _amd_energy_mj(self._amd)
        found = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if found is None else int(found)

    def driver(self) -> str | None:
        """Version of the driver."""
        if self._nvml is None:
            return None
        with contextlib.suppress(self._nvml.NVMLError):
            return str(self._nvml.nvmlSystemGetDriverVersion())
        return None

    def exclusive(self) -> bool:
        """Whether the card serves one process at a time (compute mode EXCLUSIVE_PROCESS)."""
        mode = self._ask("nvmlDeviceGetComputeMode")
        return mode is not None and mode == self._nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

    def conditions(self) -> dict[str, Any]:
        """What the card's speed depends on now: MHz, W, degrees Celsius, other processes."""
        if self._amd is not None:
            return _amd_conditions(self._amd)
        nvml = self._nvml
        if nvml is None:
            return {}
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        power = self._ask("nvmlDeviceGetPowerUsage")
        running = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return {
            "clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "clock_limit_mhz": self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1000,
            "power_limit_w": None if limit is None else limit / 1000,
            "temperature_c": self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            # In a container NVML numbers processes as the host does: ours may be among them.
            "other_processes": None
            if running is None
            else sum(process.pid != os.getpid() for process in running),
        }

    def memory_clock(self, device: torch.device) -> float | None:
        """MHz of the memory while the GPU copies, which is not what it has at rest; None: not read."""
        if self._nvml is None:
            return None
        found = None
        with contextlib.suppress(RuntimeError):  # no memory is left
            source = torch.zeros(COPY, dtype=torch.uint8, device=device)
            to, until = torch.empty_like(source), time.monotonic() + LOAD
            while found is None or time.monotonic() < until:
                for _ in range(16):
                    to.copy_(source)
                found = self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM)
                torch.cuda.synchronize(device)
                if found is None:
                    break
        return found

    def notes(self) -> tuple[str, ...]:
        """The card's number and conditions in words, for a report."""
        now = {"uuid": self._ask("nvmlDeviceGetUUID"), **self.conditions()}
        return tuple(f"{name} {value}" for name, value in now.items() if value is not None)


def _open(index: int) -> tuple[Any, Any]:
    """Return NVML and its handle of torch's device ``index``, matched by UUID; None without."""
    try:
        import pynvml
    except ImportError:
        return None, None
    with contextlib.suppress(pynvml.NVMLError, AttributeError, RuntimeError):
        pynvml.nvmlInit()
        # NVML ignores CUDA_VISIBLE_DEVICES, so that its indices are not torch's.
        uuid = torch.cuda.get_device_properties(index).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return None, None


def _amd_energy_mj(index: int) -> int | None:
    """Return what amdsmi's energy counter says of torch's device ``index``, which counts microjoules."""
    with contextlib.suppress(Exception):  # no amdsmi, or a card that counts none
        import amdsmi

        found = amdsmi.amdsmi_get_energy_count(torch.cuda._get_amdsmi_handler(index))
        # ROCm 6.0 calls the counter "power".
        counted = found.get("energy_accumulator", found.get("power"))
        return int(counted * found["counter_resolution"] / 1000)
    return None


def _amd_conditions(index: int) -> dict[str, Any]:
    """Return what torch asks amdsmi about device ``index``: MHz, W and degrees Celsius."""
    asked = {
        "clock_mhz": torch.cuda.clock_rate,
        "power_w": torch.cuda.power_draw,
        "temperature_c": torch.cuda.temperature,
    }
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        with contextlib.suppress(Exception):
            found[name] = ask(index)
    return found
