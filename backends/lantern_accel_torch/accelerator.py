"""torch's own accelerator: what ``torch.accelerator`` says is there, whoever made it."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Accelerator:
    """The kind of device that this process has next to its CPU: ``type`` is torch's name for it."""

    type: str
    count: int

    @property
    def module(self) -> Any:
        """torch's module for the kind, such as ``torch.mps``; None where it has none."""
        return getattr(torch, self.type, None)

    def device(self, index: int) -> torch.device:
        """Return device ``index``."""
        return torch.device(self.type, index)

    def name(self, index: int) -> str:
        """Return the device's model name where torch tells one, else its kind."""
        for ask in ("get_device_name", "get_device_properties"):
            with contextlib.suppress(Exception):  # each kind has its own idea of what to offer
                found = getattr(self.module, ask)(index)
                return str(getattr(found, "name", found))
        return {"mps": f"Apple {platform.machine()}"}.get(self.type, f"{self.type} device")

    def driver(self, index: int) -> str:
        """Return what stands for the driver's version: a module's, or the system's release."""
        with contextlib.suppress(Exception):
            return str(self.module.get_device_properties(index).driver_version)
        with contextlib.suppress(Exception):
            return str(self.module.__version__)
        return f"{platform.system()} {platform.mac_ver()[0] or platform.release()}"

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(device)

    def watts(self, device: torch.device) -> float | None:
        """Return the power drawn now, in watts; None where torch does not tell it in watts.

        torch 2.13 and newer read it for Intel's GPUs, with Intel's ``pyzes`` and often as root alone.
        """
        if self.type != "xpu":  # another kind's function may count in another unit
            return None
        with contextlib.suppress(Exception):
            return float(self.module.power_draw(device))
        return None

    def reading(self, device: torch.device, *names: str) -> int | None:
        """Return the first number that torch or the kind's module gives under one of these names."""
        for name in names:
            for owner in (torch.accelerator, self.module):
                for given in ((device,), ()):
                    with contextlib.suppress(Exception):  # not in this release, or of this kind
                        return int(getattr(owner, name)(*given))
        return None


def find() -> Accelerator | str:
    """Return the accelerator, or why there is none, as the end of 'not available: ...'."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # how torch 2.6 says that there is none
        device = None
    if device is None:
        return f"this torch build ({torch.__version__}) has no accelerator"
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count < 1:
        return f"torch is built for {device.type}, and finds no such device"
    return Accelerator(device.type, count)
