"""Checks a backend's stopwatch on work whose end the host has seen.

A result that has been copied to the host is finished, whatever ``synchronize`` does. A stopwatch that
does not wait for an asynchronous device reads the launches only, and fails here. Both clocks time one
and the same piece of work, so that what else runs on the machine slows both and fails neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.errors import BackendError
from lantern_accel.measure.record import ClockCheck

#: The work is made at least this long, so that launching is a small part of it.
LONG = 0.03
RATIO = (0.7, 1.3)
REPEATS = 5


def matmul_work(backend: Backend, size: int, count: int) -> Callable[[], torch.Tensor]:
    """Return work: ``count`` products of square matrices, one after another; gives the last."""
    a = torch.full((size, size), 1.0 / size, device=backend.device)

    def work() -> torch.Tensor:
        x = a
        for _ in range(count):
            x = torch.mm(x, a)
        return x

    return work


def check_stopwatch(
    backend: Backend, work: Callable[[int], Callable[[], torch.Tensor]] | None = None
) -> ClockCheck:
    """Time the same work by stopwatch and by host; raises BackendError where they disagree.

    ``work(count)`` returns a function that launches ``count`` pieces and returns a tensor that depends
    on all of them; it is grown until the host sees it take 30 ms.
    """
    make = work or (lambda count: matmul_work(backend, 512, count))
    count, run = 4, make(4)
    _host_seconds(run)  # kernels are chosen, memory is taken
    while _host_seconds(run) < LONG and count < 2**20:
        count *= 2
        run = make(count)
    ratios, hosts = [], []
    for _ in range(REPEATS):
        watch = backend.stopwatch()
        began = time.perf_counter()
        with watch:
            result = run()
        result.flatten()[:1].cpu()
        hosts.append(time.perf_counter() - began)
        ratios.append(watch.seconds / hosts[-1])
    ratio = statistics.median(ratios)
    if not RATIO[0] <= ratio <= RATIO[1]:
        raise BackendError(
            f"the stopwatch of backend {backend.name!r} ({watch.name}) reads {ratio:.2f} of the time "
            f"that {statistics.median(hosts):.3f} s of work took until its result was there; it does "
            "not measure the device, so nothing is profiled with it; correct its stopwatch() and "
            "synchronize()"
        )
    return ClockCheck(stopwatch=watch.name, work_seconds=statistics.median(hosts), ratio=ratio)


def _host_seconds(run: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    run().flatten()[:1].cpu()
    return time.perf_counter() - began
