"""What a device reaches at best on its own terms: bytes copied, bytes read, products a second.

Measured with torch's own operators before anything is compared with a limit, because a datasheet's
bandwidth is one that no program sees.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.measure.interleave import relative_spread
from lantern_accel.memory.limits import free_bytes

#: Seconds that one sample takes at least, so that the clock and the launch do not show.
SAMPLE = 0.02
#: Largest buffer and matrix that are tried.
MOST_BYTES, MOST_SIDE = 2**30, 8192


class Rate(BaseModel):
    """Samples of one rate, per second."""

    model_config = ConfigDict(extra="forbid")

    samples: list[float]

    @property
    def best(self) -> float:
        return max(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        return relative_spread(self.samples)


class Rates(BaseModel):
    """Bytes a second copied (read and written counted) and read, and FLOP a second of products."""

    model_config = ConfigDict(extra="forbid")

    copy_bytes: Rate
    read_bytes: Rate
    matmul_flops: Rate
    buffer_bytes: int
    matmul_side: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second that floors are reckoned with: the better of copying and reading."""
        return max(self.copy_bytes.median, self.read_bytes.median)


def measure_rates(backend: Backend, dtype: torch.dtype, samples: int = 7) -> Rates:
    """Measure an opened device; products in ``dtype``, two square matrices."""
    device = backend.device
    free = free_bytes(backend.memory())
    size = MOST_BYTES if free is None else min(MOST_BYTES, max(free // 8, 2**20))
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = _rate(backend, partial(target.copy_, source), 2 * size, samples)
    read = _rate(backend, partial(torch.sum, source), size, samples)
    side = 512
    while side < MOST_SIDE and _seconds(backend, _product(side, dtype, device), 1) < SAMPLE:
        side *= 2
    products = _rate(backend, _product(side, dtype, device), 2 * side**3, samples)
    return Rates(
        copy_bytes=copied,
        read_bytes=read,
        matmul_flops=products,
        buffer_bytes=size,
        matmul_side=side,
    )


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    a = torch.ones(side, side, dtype=dtype, device=device)
    return partial(torch.mm, a, a)


def _rate(backend: Backend, run: Callable[[], object], work: int, samples: int) -> Rate:
    run()  # pages, handles, kernels
    one = _seconds(backend, run, 1)
    inner = max(int(SAMPLE / max(one, 1e-6)), 1)
    return Rate(samples=[work / _seconds(backend, run, inner) for _ in range(samples)])


def _seconds(backend: Backend, run: Callable[[], object], inner: int) -> float:
    with backend.stopwatch() as watch:
        for _ in range(inner):
            run()
    return max(watch.seconds / inner, 1e-9)
