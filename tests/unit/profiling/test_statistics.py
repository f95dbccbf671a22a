"""Intervals cover what they should, and a verdict says no more than its interval allows."""

from __future__ import annotations

import numpy as np
import pytest

from lantern_accel.profiling import statistics
from lantern_accel.profiling.record import Interval


def test_a_median_and_its_interval() -> None:
    found = statistics.median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.value, found.n) == (3.0, 5)
    assert found.low == 1.0
    assert found.high == 100.0
    assert statistics.median([1.0, 2.0, 3.0, 4.0, 100.0]) == found  # the same samples, the same


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = statistics.mean(rng.normal(5, 1, 30).tolist())
        hits += found.low <= 5 <= found.high
    assert 176 <= hits <= 199  # 95 % of 200 is 190; the bootstrap is a little narrow at n = 30


def test_pairing_takes_out_what_disturbs_both() -> None:
    drift = np.linspace(1, 5, 20)
    above, below = (2 * drift).tolist(), drift.tolist()
    paired = statistics.ratio(above, below, paired=True)
    apart = statistics.ratio(above, below, paired=False)
    assert paired.value == apart.value == 2
    assert paired.high - paired.low < 1e-9
    assert apart.high - apart.low > 0.5


@pytest.mark.parametrize(
    ("value", "low", "high", "n", "settled", "says"),
    [
        (1.5, 1.4, 1.6, 9, True, "faster"),
        (0.7, 0.6, 0.8, 9, True, "slower"),
        (1.01, 0.97, 1.04, 9, True, "same"),
        (1.01, 1.005, 1.02, 9, True, "same"),  # real, and too small to matter
        (1.2, 0.9, 1.5, 9, True, "ambiguous"),
        (1.5, 1.4, 1.6, 2, True, "ambiguous"),
        (1.5, 1.4, 1.6, 9, False, "ambiguous"),
    ],
)
def test_verdicts(value: float, low: float, high: float, n: int, settled: bool, says: str) -> None:
    found = Interval(value=value, low=low, high=high, n=n)
    assert statistics.verdict(found, settled=settled) == says


def test_a_percentile_needs_samples_beyond_it() -> None:
    few = statistics.percentile([1.0] * 99, 99)
    assert few == ("not measured: 99 samples cannot show the 99th percentile; `--samples 100` can")
    enough = statistics.percentile([float(i) for i in range(100)], 99)
    assert isinstance(enough, Interval)
    assert 97 < enough.value < 99


def test_a_digest_is_of_the_value_not_of_its_spelling() -> None:
    assert statistics.digest({"b": 1, "a": 2}) == statistics.digest({"a": 2, "b": 1})
    assert statistics.digest(["a", "b"]) != statistics.digest(["b", "a"])
