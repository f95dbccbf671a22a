"""Intervals cover what they should, and a verdict says no more than its interval allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lantern_accel.records import digest
from lantern_accel_profiles.measure.record import Interval, Run
from lantern_accel_profiles.quality import interval as statistics
from lantern_accel_profiles.report.rows import is_plain


def test_a_median_and_its_interval() -> None:
    found = statistics.median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.value, found.n) == (3.0, 5)
    assert 0 < found.low < 3 < 100 < found.high  # five samples: wider than the least and the most
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
    paired = statistics.estimate_paired(statistics.ratio_of_medians, above, below)
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


def recorded_noise() -> Iterator[np.ndarray]:
    """Yield the seconds of plain decoding's requests in their order, from each published run."""
    for path in sorted((Path(__file__).parents[4] / "profiles" / "measured").glob("cpu-*.json")):
        run = Run.model_validate_json(path.read_text(encoding="utf-8"))
        for cell in run.cells:
            if is_plain(cell) and len(cell.samples) >= 30:
                yield np.array([sample.total for sample in cell.samples])


@pytest.mark.parametrize(
    ("trials", "most"), [(150, 0.09), pytest.param(1000, 0.05, marks=pytest.mark.long)]
)
def test_one_algorithm_is_seldom_judged_against_itself(trials: int, most: float) -> None:
    """An A/A test: two cells of 30 samples, each made of stretches of recorded times."""
    rng, found = np.random.default_rng(7), 0
    series = itertools.cycle(itertools.product(recorded_noise(), (4, 6, 8)))
    for times, stretch in itertools.islice(series, trials):
        starts = rng.integers(0, len(times), (2, -(-30 // stretch), 1))
        cells = times[(starts + np.arange(stretch)) % len(times)].reshape(2, -1)[:, :30]
        ratio = statistics.speed_ratio(*cells.tolist())
        found += statistics.verdict(ratio) in ("faster", "slower")
    assert found <= most * trials


def test_a_percentile_needs_samples_beyond_it() -> None:
    few = statistics.percentile([1.0] * 99, 99)
    assert few == ("not measured: 99 samples cannot show the 99th percentile; `--samples 100` can")
    enough = statistics.percentile([float(i) for i in range(100)], 99)
    assert isinstance(enough, Interval)
    assert 97 < enough.value < 99


def test_a_digest_is_of_the_value_not_of_its_spelling() -> None:
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    assert digest(["a", "b"]) != digest(["b", "a"])
