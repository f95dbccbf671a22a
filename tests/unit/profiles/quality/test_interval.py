"""Intervals cover what they should, and a verdict says no more than its interval allows."""

from __future__ import annotations

import numpy as np
import pytest

from lantern_accel.records import digest
from lantern_accel_profiles.measure.record import Interval
from lantern_accel_profiles.quality import interval as statistics


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
    paired = statistics.paired(statistics.ratio_of_medians, above, below)
    apart = statistics.unpaired_ratio(above, below)
    assert paired.value == apart.value == 2
    assert paired.high - paired.low < 1e-9
    assert apart.high - apart.low > 0.5


@pytest.mark.parametrize(
    ("value", "low", "high", "n", "says"),
    [
        (1.5, 1.4, 1.6, 5, "faster"),
        (0.7, 0.6, 0.8, 9, "slower"),
        (1.01, 0.97, 1.04, 9, "same"),
        (1.01, 1.005, 1.02, 9, "same"),  # real, and too small to matter
        (1.2, 0.9, 1.5, 9, "ambiguous"),
        (1.5, 1.4, 1.6, 4, "not measured: too few samples, 4 of 5"),
    ],
)
def test_verdicts(value: float, low: float, high: float, n: int, says: str) -> None:
    found = Interval(value=value, low=low, high=high, n=n)
    assert statistics.verdict(found) == says
    assert statistics.verdict(found, unsettled="it rained") == "not measured: it rained"


def test_noise_alone_seldom_gets_a_verdict() -> None:
    rng = np.random.default_rng(7)
    told = 0
    for _ in range(200):
        pair = rng.lognormal(0, 0.3, (2, statistics.FEWEST))
        found = statistics.paired(statistics.ratio_of_medians, pair[0].tolist(), pair[1].tolist())
        told += statistics.verdict(found) in ("faster", "slower")
    assert told <= 26  # 1 of 16 is 12.5; with three samples it is 1 of 4


def test_a_percentile_needs_samples_beyond_it() -> None:
    few = statistics.percentile([1.0] * 99, 99)
    assert few == ("not measured: 99 samples cannot show the 99th percentile; `--samples 100` can")
    enough = statistics.percentile([float(i) for i in range(100)], 99)
    assert isinstance(enough, Interval)
    assert 97 < enough.value < 99


def test_a_digest_is_of_the_value_not_of_its_spelling() -> None:
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    assert digest(["a", "b"]) != digest(["b", "a"])
