"""Checks a backend's stopwatch on work whose end the host has seen, as the conformance kit does.

A stopwatch that does not wait for an asynchronous device reads the launches only, and fails here. Both
clocks time one and the same piece of work, so that what else runs on the machine slows both and fails
neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from lantern_accel.device.backend import Backend
from lantern_accel.errors import BackendError
from lantern_accel.measure.record import ClockCheck
from lantern_accel.testing.device import Work, both_clocks, lasting, products

#: The work is made at least this long, so that launching is a small part of it.
LONG = 0.03
RATIO = (0.7, 1.3)
REPEATS = 5


def check_stopwatch(backend: Backend, work: Callable[[int], Work] | None = None) -> ClockCheck:
    """Time the same work by stopwatch and by host; raises BackendError where they disagree.

    ``work(count)`` returns ``count`` pieces of work; it is grown until the host sees it take 30 ms.
    """
    run = lasting(work or partial(products, backend), LONG)
    pairs = [both_clocks(backend, run) for _ in range(REPEATS)]
    ratio = statistics.median(watch / host for watch, host in pairs)
    seconds = statistics.median(host for _, host in pairs)
    name = backend.stopwatch().name
    if not RATIO[0] <= ratio <= RATIO[1]:
        raise BackendError(
            f"the stopwatch of backend {backend.name!r} ({name}) reads {ratio:.2f} of the time "
            f"that {seconds:.3f} s of work took until its result was there; it does "
            "not measure the device, so nothing is profiled with it; correct its stopwatch() and "
            "synchronize()"
        )
    return ClockCheck(stopwatch=name, work_seconds=seconds, ratio=ratio)
