"""No device: torch's ``meta`` tensors, which have a shape and a dtype and hold no data."""

from __future__ import annotations

import torch

from lantern_accel.device.backend import Backend, DeviceFacts


class DeviceBackend(Backend):
    """Runs every operation on shapes alone; reading a number from it is an error in torch."""

    name = "null"
    version = "0.1.0"

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("meta"))

    def facts(self) -> DeviceFacts:
        """There is nothing to describe."""
        return DeviceFacts(
            backend=self.name, device=str(self.device), name="none", torch=torch.__version__
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """Every dtype, since nothing is computed."""
        return (torch.float32, torch.bfloat16, torch.float16)

    def synchronize(self) -> None:
        """Do nothing: there is no work."""
