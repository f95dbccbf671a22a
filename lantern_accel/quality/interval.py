"""Computes a figure with its bootstrap interval: percentile bootstrap, 95 %, from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from lantern_accel.records import Record

Array = NDArray[np.float64]

RESAMPLES = 2000


class Interval(Record):
    """A figure with its 95 % bootstrap interval over ``n`` samples."""

    model_config = ConfigDict(allow_inf_nan=False)

    value: float
    low: float
    high: float
    n: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Interval:
        if self.low > self.high:
            raise ValueError(f"the interval runs from {self.low} down to {self.high}")
        return self


def picks(n: int, seed: int) -> NDArray[np.int64]:
    """Return which samples each resample has, ``[RESAMPLES, n]``."""
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def interval(value: Any, draws: Any, n: int) -> Interval:
    """Return a figure with the interval of its resamples ``draws``."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(value=float(value), low=float(low), high=float(high), n=n)


def paired(of: Callable[..., Any], *columns: Sequence[float]) -> Interval:
    """Return a statistic of samples and its interval; entry i of all columns is one sample.

    ``of`` reduces the last axis of every column. Columns are cut to the shortest and resampled
    together, so that what disturbed a sample disturbs all of its figures.
    """
    n = min(len(column) for column in columns)
    data = [np.asarray(column[:n], dtype=np.float64) for column in columns]
    chosen = picks(n, 1)
    return interval(of(*data), of(*(column[chosen] for column in data)), n)


def mean(samples: Sequence[float]) -> Interval:
    """Return the mean of samples and its interval."""
    return paired(lambda x: np.mean(x, axis=-1), samples)


def share(part: Array, whole: Array) -> Any:
    """Return the ratio of the sums over the last axis: tokens per step."""
    return part.sum(axis=-1) / whole.sum(axis=-1)
