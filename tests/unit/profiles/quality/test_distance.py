"""The kernel distance: its definition, no bias, and a shift that it sees."""

from __future__ import annotations

import numpy as np
import pytest

from lantern_accel_profiles.quality.set_metrics import SCALE, kernel_distance, permutation_test


def test_it_is_the_sum_over_pairs_that_the_paper_writes() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return float((a @ b / 3 + 1) ** 3)

    total = sum(
        k(x[i], x[j]) + k(y[i], y[j]) - k(x[i], y[j]) - k(x[j], y[i])
        for i in range(5)
        for j in range(5)
        if i != j
    )
    assert kernel_distance(x, y).value == pytest.approx(SCALE * total / 20)


def test_two_sets_of_one_law_are_apart_by_chance_only_on_both_sides_of_zero() -> None:
    values = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        values.append(kernel_distance(rng.normal(size=(24, 8)), rng.normal(size=(24, 8))).value)
    assert abs(np.mean(values)) < 3 * np.std(values) / 40**0.5
    assert min(values) < 0 < max(values)


def test_the_interval_is_about_the_value_and_not_biased_by_copies() -> None:
    # A bootstrap that pairs an image with its own copy shifts every draw upwards.
    rng = np.random.default_rng(4)
    found = kernel_distance(rng.normal(size=(20, 4)), rng.normal(size=(20, 4)))
    middle = (found.low + found.high) / 2
    assert abs(middle - found.value) < 0.35 * (found.high - found.low)


def test_sets_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two images"):
        kernel_distance(np.zeros((1, 3)), np.zeros((1, 3)))


def _shifted(shift: float, seed: int, n: int = 24) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    return permutation_test(rng.normal(size=(n, 8)) + shift, rng.normal(size=(n, 8)))


def test_the_permutation_test_flags_equal_sets_as_seldom_as_it_says() -> None:
    flagged = sum(_shifted(0.0, seed)[0] < 0.05 for seed in range(100))
    assert flagged <= 12  # 5 expected; 12 or more would come once in 500


def test_the_permutation_test_finds_what_it_says_it_finds() -> None:
    found, stated, seen = 0, [], []
    for seed in range(40):
        rng = np.random.default_rng(1000 + seed)
        x, y = rng.normal(size=(24, 8)) + 0.6, rng.normal(size=(24, 8))
        p_value, detectable = permutation_test(x, y)
        found += p_value < 0.05
        stated.append(detectable)
        seen.append(kernel_distance(x, y).value)
    assert found >= 36
    assert np.median(seen) > np.median(stated)
    # What lies below the stated distance is found seldom.
    small = [_shifted(0.1, seed)[0] < 0.05 for seed in range(40)]
    assert sum(small) < 20
    # More images find less.
    assert _shifted(0.0, 1, n=96)[1] < _shifted(0.0, 1)[1]
