"""Stands in for ``habana_frameworks.torch.hpu`` (and as ``torch.hpu``) on the software HPU.

The names and signatures are the bridge's; only what torch and the backend read is here. There is one
device. Operators are done when their call returns; copies to the host that do not block, and what waits
for them, are a stream's own affair, and happen as late as they may.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from lantern_accel_hpu.software import NAME
from lantern_accel_hpu.software import metrics as metrics
from lantern_accel_hpu.software.graphs import HPUGraph as HPUGraph
from lantern_accel_hpu.software.graphs import graph as graph


def _lazy_init() -> None:
    """Do nothing; torch calls it before the first tensor."""


def is_initialized() -> bool:
    """Return whether this process has a card."""
    return bool(torch.ops.lantern_software_hpu.acquired())


def is_available() -> bool:
    """True once it is registered."""
    return True


def device_count() -> int:
    """There is one."""
    return 1


def get_device_name(device: Any = None) -> str:
    """Return a name that no one takes for a card."""
    return NAME


def current_device() -> int:
    """Acquire a card and return its index, 0; raises RuntimeError with the driver's words."""
    torch.ops.lantern_software_hpu.acquire()
    return 0


def module_id() -> int:
    """Own addition: return the module number of this process's card."""
    return int(torch.ops.lantern_software_hpu.acquire())


def synchronize() -> None:
    """Wait for all streams, and for every copy to land."""
    torch.ops.lantern_software_hpu.synchronize_all()


# --- streams and events -------------------------------------------------------------------------


class Stream:
    """An order of work, run by a thread of its own; operators run when they are called, after it."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int = -1) -> None:
        made = stream_id < 0
        self.stream_id = torch.ops.lantern_software_hpu.new_stream() if made else stream_id


_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Return the stream of this thread."""
    return Stream(stream_id=getattr(_current, "id", 0))


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Run the block on a stream; None: on the present one."""
    if stream is None:
        yield
        return
    before = torch.ops.lantern_software_hpu.set_stream(stream.stream_id)
    _current.id = stream.stream_id
    try:
        yield
    finally:
        torch.ops.lantern_software_hpu.set_stream(before)
        _current.id = before


def default_stream(device: Any = None) -> Stream:
    """Return the stream that every thread begins with."""
    return Stream(stream_id=0)


class Event:
    """A place in the work of a stream; its time is that of the host when it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at: float | None = None
        self._place: tuple[int, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind what the stream was given so far."""
        stream = stream or current_stream()
        number = torch.ops.lantern_software_hpu.record(stream.stream_id)
        self._place = (stream.stream_id, number)
        self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let what a stream is given from now on come after this; the host does not wait."""
        stream = stream or current_stream()
        if self._place is not None:
            torch.ops.lantern_software_hpu.wait_event(stream.stream_id, *self._place)

    def synchronize(self) -> None:
        """Wait until its place was reached: not for copies to memory that is not pinned."""
        if self._place is not None:
            torch.ops.lantern_software_hpu.synchronize(*self._place)

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds of the host until ``end_event``; not a Gaudi's."""
        if self._at is None or end_event._at is None:
            raise RuntimeError("both events must be recorded before their distance is asked for")
        return 1e3 * (end_event._at - self._at)


# --- memory -------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the bytes that tensors on the device hold, their peak, and the limit."""
    in_use, peak, limit = torch.ops.lantern_software_hpu.memory()
    return {"Limit": limit, "InUse": in_use, "MaxInUse": peak}


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak at what is in use."""
    torch.ops.lantern_software_hpu.reset_peak()


def set_memory_limit(size: int) -> None:
    """Own addition: refuse allocations above ``size`` bytes in all, with torch.OutOfMemoryError."""
    torch.ops.lantern_software_hpu.set_limit(size)


# --- kernels ------------------------------------------------------------------------------------


def kernels() -> dict[str, int]:
    """Own addition: how often each operator reached the device's dispatch key, by name."""
    found: dict[str, int] = dict(torch.ops.lantern_software_hpu.kernels())
    return {name.rstrip("."): times for name, times in found.items()}


def reset_kernels() -> None:
    """Own addition: count from zero."""
    torch.ops.lantern_software_hpu.reset_kernels()
