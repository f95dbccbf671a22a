"""Counters of programs that have ended, by which the last program of a tile knows that it is the last.

They are 0 between launches: the last program puts its counter back. Launches that run at once must not
share them. Those of one stream run one after another, and so do the replays of one backend's recordings,
whichever stream they are given to: each stream has its own counters, and each backend's recordings have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: Counters at least: more than a step's products have tiles.
LEAST = 16384


class Counters:
    """Counters on a device that keep their addresses while they are enough: recorded steps have them."""

    def __init__(self) -> None:
        #: Every tensor that was made: what was recorded may still have it.
        self._made: list[Tensor] = []

    def of(self, device: torch.device, count: int) -> Tensor:
        """Return at least ``count`` counters, int32, all of them 0."""
        if not self._made or len(self._made[-1]) < count:
            self._made.append(torch.zeros(max(count, LEAST), dtype=torch.int32, device=device))
        return self._made[-1]


#: Counters of launches outside recordings, by device and stream.
_streams: dict[tuple[torch.device, int], Counters] = {}
#: Counters of the recording that this thread is making.
_recording: ContextVar[Counters | None] = ContextVar("recording", default=None)


@contextmanager
def recording(own: Counters) -> Iterator[None]:
    """Let launches of this thread inside the block use ``own`` counters."""
    before = _recording.set(own)
    try:
        yield
    finally:
        _recording.reset(before)


def counters_of(device: torch.device, count: int) -> Tensor:
    """Return at least ``count`` counters for a launch on the current stream, int32, all of them 0."""
    own = _recording.get()
    if own is None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        own = _streams.setdefault((device, stream), Counters())
    return own.of(device, count)
