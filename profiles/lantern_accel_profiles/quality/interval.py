"""Computes figures with their 95 % intervals, and the verdict that these allow.

An interval is the percentile bootstrap's, widened as Student's t widens one of few samples. Times of one
process depend on those before them, so they are resampled in blocks of neighbours (Kuensch 1989).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from lantern_accel.records import Record, not_measured

Array = NDArray[np.float64]

RESAMPLES = 2000
Verdict = Literal["faster", "slower", "same", "ambiguous"]

#: Ratios within this of 1, interval and all, are the same speed.
SAME = 0.05
#: Samples below which no verdict is given.
FEWEST = 5
#: The field ``total_variation_per_token``, which older files call ``total_variation``.
LOSS = AliasChoices("total_variation_per_token", "total_variation")


class Interval(Record):
    """A figure with its 95 % bootstrap interval over ``n`` samples."""

    model_config = ConfigDict(allow_inf_nan=False)

    value: float
    low: float
    high: float
    n: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> Interval:
        if self.low > self.high:
            raise ValueError(f"the interval runs from {self.low} down to {self.high}")
        return self


def block_length(n: int) -> int:
    """Return how many neighbours of ``n`` times are resampled together: 1 of 5, 4 of 30, 9 of 100."""
    return max(round(math.sqrt(n)) - 1, 1)


def picks(n: int, seed: int, block: int = 1) -> NDArray[np.int64]:
    """Return which samples each resample has, ``[RESAMPLES, n]``: blocks of neighbours, end to end."""
    starts = np.random.default_rng(seed).integers(0, n, (RESAMPLES, -(-n // block), 1))
    return ((starts + np.arange(block)) % n).reshape(RESAMPLES, -1)[:, :n]


def interval(value: Array | float, draws: Array, n: int, block: int = 1) -> Interval:
    """Return a figure with the interval of its resamples ``draws``, widened for few blocks.

    The ends of a figure above 0 stay above 0: their ratios to it are widened.
    """
    low, high = (float(end) for end in np.quantile(draws, (0.025, 0.975)))
    value, wider = float(value), _widening(n / block)
    if min(low, value) > 0:
        low, high = value * (low / value) ** wider, value * (high / value) ** wider
    else:
        low, high = value - wider * (value - low), value + wider * (high - value)
    return Interval(value=value, low=low, high=high, n=n)


def _widening(blocks: float) -> float:
    """Return Student's t over the normal's 97.5 % point, times what the bootstrap's deviation lacks.

    Hill's expansion (1970) in the degrees of freedom, within 1 % from 3 on; fewer count as 3.
    """
    free, z = max(blocks - 1, 3.0), 1.959964
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return t / z * math.sqrt((free + 1) / free)


def estimate_paired(
    of: Callable[..., Array], *columns: Sequence[float], in_turns: bool = False
) -> Interval:
    """Return a statistic of samples and its interval; entry i of all columns is one sample.

    ``of`` reduces the last axis of every column. Columns are cut to the shortest and resampled
    together, so that what disturbed a sample disturbs all of its figures. ``in_turns``: samples are
    times in the order in which one process took them. Neighbours may be alike or alternate, so the
    wider of two intervals holds: of samples alone, and of blocks.
    """
    n = min(len(column) for column in columns)
    data = [np.asarray(column[:n], dtype=np.float64) for column in columns]
    found = []
    for block in (1, block_length(n)) if in_turns else (1,):
        chosen = picks(n, 1, block)
        found.append(interval(of(*data), of(*(column[chosen] for column in data)), n, block))
    ends = {"low": min(one.low for one in found), "high": max(one.high for one in found)}
    return found[0].model_copy(update=ends)


def mean(samples: Sequence[float]) -> Interval:
    """Return the mean of samples and its interval."""
    return estimate_paired(lambda x: np.mean(x, axis=-1), samples)


def share(part: Array, whole: Array) -> Array:
    """Return the ratio of the sums over the last axis: tokens per step."""
    found: Array = part.sum(axis=-1) / whole.sum(axis=-1)
    return found


def median(samples: Sequence[float]) -> Interval:
    """Return the median of times in their order, and its interval."""
    return estimate_paired(lambda x: np.median(x, axis=-1), samples, in_turns=True)


def reciprocal(found: Interval) -> Interval:
    """Return one over a figure above 0, with the ends of its interval."""
    return Interval(value=1 / found.value, low=1 / found.high, high=1 / found.low, n=found.n)


def percentile(samples: Sequence[float], p: float) -> Interval | str:
    """Return the ``p``-th percentile of times and its interval; not measured where they are too few.

    Of n samples, ``n (1 - p/100)`` lie beyond the percentile; below one it is only the maximum.
    """
    needed = round(1 / (1 - p / 100))
    if len(samples) < needed:
        return not_measured(
            f"{len(samples)} samples cannot show the {p:g}th percentile; `--samples {needed}` can"
        )
    return estimate_paired(lambda x: np.percentile(x, p, axis=-1), samples, in_turns=True)


def ratio_of_medians(a: Array, b: Array) -> Array:
    """Return the ratio of the medians over the last axis."""
    found: Array = np.median(a, axis=-1) / np.median(b, axis=-1)
    return found


def speed_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of the medians of two columns of times that were taken in turns."""
    return estimate_paired(ratio_of_medians, above, below, in_turns=True)


def unpaired_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two medians of times that were not taken together, and its interval."""
    a, b = median(above), median(below)
    # Errors of both sides are independent: their squares add up, as logarithms.
    low, high = (
        math.hypot(math.log(one / a.value), math.log(other / b.value))
        for one, other in ((a.low, b.high), (a.high, b.low))
    )
    ratio = a.value / b.value
    return Interval(
        value=ratio, low=ratio * math.exp(-low), high=ratio * math.exp(high), n=min(a.n, b.n)
    )


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
