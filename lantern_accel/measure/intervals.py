"""Medians, percentiles and ratios with bootstrap intervals, and the verdict that they allow.

Percentile bootstrap, 95 %, from a fixed seed: the same samples give the same interval.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lantern_accel.measure.record import Interval, NotMeasured, not_measured

Array = NDArray[np.float64]
Verdict = Literal["faster", "slower", "same", "ambiguous"]

RESAMPLES = 2000
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


def _resampled(n: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def _interval(value: float, draws: Array, n: int) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(value=value, low=float(low), high=float(high), n=n)


def median(samples: Sequence[float]) -> Interval:
    """Return the median of samples and its interval."""
    return _statistic(samples, lambda x: np.median(x, axis=-1))


def mean(samples: Sequence[float]) -> Interval:
    """Return the mean of samples and its interval."""
    return _statistic(samples, lambda x: np.mean(x, axis=-1))


def percentile(samples: Sequence[float], p: float) -> Interval | str:
    """Return the ``p``-th percentile and its interval; not measured where there are too few samples.

    Of n samples, ``n (1 - p/100)`` lie beyond the percentile; below one it is only the maximum.
    """
    needed = round(_BEYOND / (1 - p / 100))
    if len(samples) < needed:
        return not_measured(
            f"{len(samples)} samples cannot show the {p:g}th percentile; `--samples {needed}` can"
        )
    return _statistic(samples, lambda x: np.percentile(x, p, axis=-1))


def _statistic(samples: Sequence[float], of: Callable[[Array], Any]) -> Interval:
    data = np.asarray(samples, dtype=np.float64)
    draws = np.asarray(of(data[_resampled(len(data), 1)]))
    return _interval(float(of(data)), draws, len(data))


def ratio(above: Sequence[float], below: Sequence[float], *, paired: bool) -> Interval:
    """Return the ratio of two medians and its interval.

    ``paired``: sample i of both was taken in the same round, so that both are resampled together and
    what disturbed a round disturbs neither's ratio.
    """
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if paired:
        n = min(len(a), len(b))
        a, b = a[:n], b[:n]
        picks = _resampled(n, 2)
        draws = np.median(a[picks], axis=-1) / np.median(b[picks], axis=-1)
    else:
        n = min(len(a), len(b))
        first, second = _resampled(len(a), 3), _resampled(len(b), 4)
        draws = np.median(a[first], axis=-1) / np.median(b[second], axis=-1)
    return _interval(float(np.median(a) / np.median(b)), draws, n)


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
