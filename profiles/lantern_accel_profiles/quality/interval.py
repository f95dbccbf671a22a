"""Computes figures with their intervals, and the verdict that these allow: percentile bootstrap, 95 %."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from lantern_accel.records import Record, not_measured

Array = NDArray[np.float64]

RESAMPLES = 2000
Verdict = Literal["faster", "slower", "same", "ambiguous"]

#: Ratios within this of 1, interval and all, are the same speed.
SAME = 0.05
#: Samples below which no verdict is given: with five rounds that must all agree, chance alone gives one
#: in 1 of 16 comparisons; with three it would in 1 of 4.
FEWEST = 5
#: A percentile needs this many samples beyond it to be seen at all.
_BEYOND = 1


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


def interval(value: Array | float, draws: Array, n: int) -> Interval:
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


def share(part: Array, whole: Array) -> Array:
    """Return the ratio of the sums over the last axis: tokens per step."""
    found: Array = part.sum(axis=-1) / whole.sum(axis=-1)
    return found


def median(samples: Sequence[float]) -> Interval:
    """Return the median of samples and its interval."""
    return paired(lambda x: np.median(x, axis=-1), samples)


def reciprocal(found: Interval) -> Interval:
    """Return one over a figure above 0, with the ends of its interval."""
    return Interval(value=1 / found.value, low=1 / found.high, high=1 / found.low, n=found.n)


def percentile(samples: Sequence[float], p: float) -> Interval | str:
    """Return the ``p``-th percentile and its interval; not measured where there are too few samples.

    Of n samples, ``n (1 - p/100)`` lie beyond the percentile; below one it is only the maximum.
    """
    needed = round(_BEYOND / (1 - p / 100))
    if len(samples) < needed:
        return not_measured(
            f"{len(samples)} samples cannot show the {p:g}th percentile; `--samples {needed}` can"
        )
    return paired(lambda x: np.percentile(x, p, axis=-1), samples)


def ratio_of_medians(a: Array, b: Array) -> Array:
    """Return the ratio of the medians over the last axis."""
    found: Array = np.median(a, axis=-1) / np.median(b, axis=-1)
    return found


def unpaired_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two medians of samples that were not taken together, and its interval."""
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    draws = ratio_of_medians(a[picks(len(a), 3)], b[picks(len(b), 4)])
    return interval(ratio_of_medians(a, b), draws, min(len(a), len(b)))


def relative_spread(values: Sequence[float]) -> float | None:
    """Return half the distance between the quartiles over the median; None for a single value.

    Of fewer than four values the ends stand for the quartiles.
    """
    ordered = sorted(values)
    if len(ordered) < 2:
        return None
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 4:
        low, _, high = statistics.quantiles(ordered, n=4)
    return (high - low) / 2 / statistics.median(ordered)


def verdict(found: Interval, *, unsettled: str = "") -> Verdict | str:
    """Judge a speed ratio by its interval: faster, slower, same, or ambiguous within noise.

    Noise is not to blame for what more measuring would tell: where ``unsettled`` says why warm-up is not
    believed, or there are fewer than :data:`FEWEST` samples, the text says so and no verdict is given.
    """
    if unsettled:
        return not_measured(unsettled)
    if found.n < FEWEST:
        return not_measured(f"too few samples, {found.n} of {FEWEST}")
    if found.low >= 1 - SAME and found.high <= 1 + SAME:
        return "same"
    if found.low > 1:
        return "faster"
    if found.high < 1:
        return "slower"
    return "ambiguous"
