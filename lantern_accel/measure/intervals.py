"""Medians, percentiles and ratios with bootstrap intervals, and the verdict that they allow."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from lantern_accel.measure.record import NotMeasured, not_measured
from lantern_accel.quality.interval import (
    RESAMPLES,
    Array,
    Interval,
    interval,
    mean,
    paired,
    picks,
    share,
)

__all__ = [
    "FEWEST",
    "RESAMPLES",
    "SAME",
    "Array",
    "Verdict",
    "digest",
    "mean",
    "median",
    "paired",
    "percentile",
    "relative_spread",
    "share",
    "speed_ratio",
    "unpaired_ratio",
    "verdict",
]

Verdict = Literal["faster", "slower", "same", "ambiguous"]

#: Ratios within this of 1, interval and all, are the same speed.
SAME = 0.05
#: Samples below which no verdict is given: with five rounds that must all agree, chance alone gives one
#: in 1 of 16 comparisons; with three it would in 1 of 4.
FEWEST = 5
#: A percentile needs this many samples beyond it to be seen at all.
_BEYOND = 1


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value in its canonical form."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def median(samples: Sequence[float]) -> Interval:
    """Return the median of samples and its interval."""
    return paired(lambda x: np.median(x, axis=-1), samples)


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


def speed_ratio(a: Array, b: Array) -> Any:
    """Return the ratio of the medians over the last axis."""
    return np.median(a, axis=-1) / np.median(b, axis=-1)


def unpaired_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two medians of samples that were not taken together, and its interval."""
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    draws = speed_ratio(a[picks(len(a), 3)], b[picks(len(b), 4)])
    return interval(speed_ratio(a, b), draws, min(len(a), len(b)))


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


def verdict(found: Interval, *, unsettled: str = "") -> Verdict | NotMeasured:
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
