"""The opened Abacus: torch's CPU with the reference operations, until ``DEVICE`` names your device.

Whatever is not written here has a reference implementation that is correct on any device torch knows.
CHECKLIST.md says what to override first.
"""

from __future__ import annotations

import torch

from lantern_accel.device import Backend, DeviceFacts

#: What torch calls your device: "npu" where you would write torch.device("npu", 0).
DEVICE = "cpu"


class DeviceBackend(Backend):
    """One opened device."""

    name = "abacus"
    version = "0.1.0"

    def __init__(self, index: int) -> None:
        # The CPU has no index; write torch.device(DEVICE, index) for a device that has.
        super().__init__(torch.device(DEVICE) if DEVICE == "cpu" else torch.device(DEVICE, index))

    def facts(self) -> DeviceFacts:
        """Describe the device; what is not known stays out."""
        return DeviceFacts(
            backend=self.name, device=str(self.device), name="Abacus", torch=torch.__version__
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes the device computes in, the best one for decoding first."""
        return (torch.float32,)

    def synchronize(self) -> None:
        """Wait until the device has done all the work given to it."""
        if self.device.type != "cpu":  # which has done it when a call returns
            torch.accelerator.synchronize(self.device)
