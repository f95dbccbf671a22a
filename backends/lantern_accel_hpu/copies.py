"""Small buffers read by the host while the Gaudi runs on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.capture import HostCopy
from lantern_accel_hpu import faults
from lantern_accel_hpu.bridge import Bridge
from lantern_accel_hpu.graphs import Watch

#: Copies that memory is kept for; more of them take more when they are posted.
SLOTS = 4


@dataclass(frozen=True)
class _Slot:
    """A snapshot on the device, its copy in pinned memory if there is any, and events between them."""

    snapshot: Tensor
    host: Tensor | None
    taken: Any
    copied: Any


class EventCopy(HostCopy):
    """Copies on a stream of its own and waits for an event, never for the whole device.

    ``post`` takes a snapshot in the order of the steps, so that the next step may overwrite the source;
    the way to the host then runs next to that step. An event orders a copy to memory that is pinned for
    the device, and no other: to pageable memory the bridge copies by way of a buffer of its own, in a
    thread that no event waits for. Where there is no pinned memory the snapshot is read by a copy
    that returns when the values are there, on that stream, so that the step under way runs on.
    """

    lag = 1

    def __init__(self, source: Tensor, bridge: Bridge, watch: Watch) -> None:
        super().__init__(source)
        self._bridge, self._watch = bridge, watch
        self._stream = bridge.copy_stream
        self._free = deque(self._slot() for _ in range(SLOTS))
        self._posted: deque[_Slot] = deque()
        # Once now, so that no request compiles it.
        self.post()
        self.read()

    def _slot(self) -> _Slot:
        source, event = self._source, self._bridge.hpu.Event
        host = self._bridge.allocate_pinned(source.shape, source.dtype)
        return _Slot(torch.empty_like(source), host, taken=event(), copied=event())

    def post(self) -> None:
        """Start a copy of what the buffer holds after the work given so far."""
        slot = self._free.popleft() if self._free else self._slot()
        hpu = self._bridge.hpu
        slot.snapshot.copy_(self._source)
        self._bridge.flush()
        slot.taken.record(hpu.current_stream())
        if slot.host is not None:
            slot.taken.wait(self._stream)
            with hpu.stream(self._stream):
                slot.host.copy_(slot.snapshot, non_blocking=True)
                slot.copied.record(self._stream)
        self._posted.append(slot)

    def read(self) -> Tensor:
        """Return the oldest posted copy that was not read yet, on the host."""
        value = self._oldest()
        if not self._posted:
            self._watch.settle()
        return value

    def clear(self) -> None:
        """Forget what was posted and not read; waits for it, since its memory is written again."""
        while self._posted:
            self._oldest()
        self._watch.settle()

    def _oldest(self) -> Tensor:
        slot = self._posted.popleft()
        try:
            if slot.host is None:
                slot.taken.wait(self._stream)
                with self._bridge.hpu.stream(self._stream):
                    value = slot.snapshot.to("cpu", copy=True)
            else:
                slot.copied.synchronize()
                value = slot.host.clone()
        except RuntimeError as error:
            raise faults.explain(error, "decoding") or error from error
        self._free.append(slot)
        return value
