"""Small buffers read by the host while the GPU runs on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.device.capture import HostCopy
from lantern_accel_cuda import faults
from lantern_accel_cuda.handles import event

#: Copies that may be under way before more memory is taken.
SLOTS = 4


@dataclass(frozen=True)
class _Slot:
    """A snapshot on the GPU, its pinned copy on the host, and the events that order the two."""

    snapshot: Tensor
    host: Tensor
    taken: torch.cuda.Event
    copied: torch.cuda.Event


class PinnedCopy(HostCopy):
    """Copies through pinned memory on a stream of its own; the host waits for an event at most.

    ``post`` takes a snapshot in the order of the steps, so that the next step may overwrite the source;
    the way to the host then runs next to that step. With a lag of one step, ``read`` waits for a copy
    that began a step ago.
    """

    lag = 1

    def __init__(self, source: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(source)
        self._stream = stream
        self._free = deque(self._slot() for _ in range(SLOTS))
        self._posted: deque[_Slot] = deque()

    def _slot(self) -> _Slot:
        source = self._source
        return _Slot(
            snapshot=torch.empty_like(source),
            host=pinned_like(source),
            taken=event(),
            copied=event(),
        )

    def post(self) -> None:
        """Start a copy of what the buffer holds after the work given so far."""
        slot = self._free.popleft() if self._free else self._slot()
        current = torch.cuda.current_stream(self._source.device)
        slot.snapshot.copy_(self._source)
        slot.taken.record(current)
        self._stream.wait_event(slot.taken)
        with torch.cuda.stream(self._stream):
            slot.host.copy_(slot.snapshot, non_blocking=True)
            slot.copied.record(self._stream)
        self._posted.append(slot)

    def read(self) -> Tensor:
        """Return the oldest posted copy that was not read yet, on the host."""
        slot = self._posted.popleft()
        with faults.explain_errors(self._source.device, "decoding"):
            slot.copied.synchronize()
        value = slot.host.clone()
        self._free.append(slot)
        return value

    def clear(self) -> None:
        """Forget what was posted and not read.

        A forgotten copy may still be under way: its slot's next copy follows it on the same stream.
        """
        self._free.extend(self._posted)
        self._posted.clear()


def pinned_like(source: Tensor) -> Tensor:
    """Return page-locked host memory of the shape and dtype of ``source``."""
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
