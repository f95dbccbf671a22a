"""Work that lasts, timed by a device's stopwatch and by the host: what checks and ceilings share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend

#: What launches work and returns a tensor that depends on all of it.
Work = Callable[[], Tensor]


def products(backend: Backend, count: int) -> Work:
    """Return work: ``count`` products of square matrices, one after another.

    In float32, which every processor multiplies fast, as not every one does bfloat16.
    """
    side = torch.full((512, 512), 1 / 512, dtype=torch.float32, device=backend.device)

    def work() -> Tensor:
        product = side
        for _ in range(count):
            product = product @ side
        return product

    return work


def lasting(make: Callable[[int], Work], seconds: float) -> Work:
    """Return the work of as many pieces as the device takes ``seconds`` for; kernels are chosen then."""
    count, run = 1, make(1)
    _until_there(run)
    while _until_there(run) < seconds and count < 2**20:
        count *= 2
        run = make(count)
    return run


def _until_there(run: Work) -> float:
    """Return the host's seconds until a result has arrived: it is finished, whatever was waited for."""
    began = time.perf_counter()
    run().flatten()[:1].cpu()
    return time.perf_counter() - began


def both_clocks(backend: Backend, run: Work) -> tuple[float, float]:
    """Time one and the same work by the stopwatch, and by the host until its result has arrived."""
    watch = backend.stopwatch()
    began = time.perf_counter()
    with watch:
        result = run()
    result.flatten()[:1].cpu()
    return watch.seconds, time.perf_counter() - began
