"""Small buffers read by the host while the device runs on."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lantern_accel.device.capture import HostCopy
from lantern_accel_xla.runtime import Runtime


class Snapshots(HostCopy):
    """Keeps the memory that a buffer had, which a step replaces and never writes to.

    A step's program gives a buffer that is not donated new memory, so that ``post`` only notes the old
    one: nothing is copied on the device, and ``read`` waits for the step that made it, a step late.
    ``donated``: a captured step writes to that memory already, so that every post copies it.
    """

    lag = 1

    def __init__(self, source: Tensor, runtime: Runtime, *, donated: bool = False) -> None:
        super().__init__(source)
        self._runtime, self._donated = runtime, donated
        self._posted: deque[Tensor] = deque()

    def post(self) -> None:
        """Note what the buffer holds after the work given so far."""
        # A clone would be the same memory.
        source = torch.maximum(self._source, self._source) if self._donated else self._source
        if self._runtime.pending([source])[0]:
            self._runtime.sync()
        self._posted += self._runtime.data([source])

    def read(self) -> Tensor:
        """Return the oldest posted copy that was not read yet, on the host."""
        return self._posted.popleft().cpu()

    def clear(self) -> None:
        """Forget what was posted and not read."""
        self._posted.clear()
