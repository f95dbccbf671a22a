"""FID, KID, Inception score, precision and recall: closed forms, brute force, and the kept libraries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lantern_accel_profiles.quality.set_metrics import (
    FeatureSet,
    Reference,
    frechet,
    inception_score,
    precision_recall,
    unpaired_distance,
)

FIVE = Reference.of_features(np.zeros((3, 5)))


def gaussian(mean: np.ndarray, covariance: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Draw features whose sample moments are exactly these."""
    d = len(mean)
    x = np.random.default_rng(seed).normal(size=(n, d))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False)).T)
    return mean + x @ np.linalg.cholesky(covariance).T


def test_fid_of_two_gaussians_is_the_closed_form() -> None:
    # Covariances that commute: the distance is that of the standard deviations.
    first, second = np.array([1.0, 4.0, 9.0]), np.array([4.0, 1.0, 0.25])
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    shift = np.array([0.5, -1.0, 2.0])
    x = gaussian(shift, turn @ np.diag(first) @ turn.T, 50, 1)
    y = gaussian(np.zeros(3), turn @ np.diag(second) @ turn.T, 80, 2)
    expected = shift @ shift + ((np.sqrt(first) - np.sqrt(second)) ** 2).sum()
    reference = Reference.of_features(y)
    assert FeatureSet(x, reference).distance() == pytest.approx(expected, abs=1e-9)
    stored = Reference.of_moments(y.mean(0), np.cov(y, rowvar=False))
    assert FeatureSet(x, stored).distance() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sizes", [(40, 60), (9, 60), (40, 7), (6, 5)])
def test_fid_is_the_library_s_with_a_tiny_network(sizes: tuple[int, int]) -> None:
    library = pytest.importorskip("torchmetrics.image.fid", exc_type=ImportError)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 12), nn.Tanh()).double().eval()
    net.num_features = 12
    real = torch.rand(sizes[0], 3, 8, 8, dtype=torch.float64)
    fake = torch.rand(sizes[1], 3, 8, 8, dtype=torch.float64).square()
    metric = library.FrechetInceptionDistance(feature=net)
    with torch.no_grad():
        metric.update(real, real=True)
        metric.update(fake, real=False)
        seen = [net(x).numpy() for x in (fake, real)]
    ours = FeatureSet(seen[0], Reference.of_features(seen[1])).distance()
    # Null eigenvalues of a general product leave square roots of rounding noise in the library.
    assert ours == pytest.approx(float(metric.compute()), abs=1e-3)
    covariances = [np.cov(x, rowvar=False) for x in seen]
    values = np.linalg.eigvals(covariances[0] @ covariances[1]).astype(complex)
    cross = np.sqrt(values).real.sum()
    plain = ((seen[0].mean(0) - seen[1].mean(0)) ** 2).sum() - 2 * cross
    assert ours == pytest.approx(plain + sum(np.trace(c) for c in covariances), abs=1e-5)


def test_counts_are_copies_of_images() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 5)), rng.normal(size=(20, 5))
    counts = rng.integers(0, 3, 12)
    reference = Reference.of_features(y)
    copied = FeatureSet(np.repeat(x, counts, axis=0), reference).distance()
    assert FeatureSet(x, reference).distance(counts.astype(float)) == pytest.approx(
        copied, abs=1e-9
    )


def test_the_extrapolation_takes_most_of_the_bias_away() -> None:
    rng = np.random.default_rng(4)
    d, values, limits = 16, [], []
    reference = Reference.of_moments(np.zeros(d), np.eye(d))
    for _ in range(12):
        value, infinity = frechet(rng.normal(size=(120, d)), reference, resamples=4)
        values.append(value.value)
        limits.append(infinity.value)
    assert np.mean(values) > 0.5  # the truth is 0
    assert abs(np.mean(limits)) < 0.3 * np.mean(values)


def test_the_interval_holds_the_value_and_covers_what_other_images_give() -> None:
    rng = np.random.default_rng(6)
    reference = Reference.of_moments(np.zeros(6), np.eye(6))
    value, _ = frechet(rng.normal(size=(150, 6)) + 0.5, reference)
    assert value.low < value.value < value.high
    others = [FeatureSet(rng.normal(size=(150, 6)) + 0.5, reference).distance() for _ in range(40)]
    width = value.high - value.low
    assert 0.5 < width / (3.92 * np.std(others)) < 2.0


def test_kid_of_sets_of_different_sizes_is_the_sum_over_pairs() -> None:
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(4, 3)), rng.normal(size=(6, 3))
    own, real, cross = ((a @ b.T / 3 + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = [k[~np.eye(len(k), dtype=bool)].mean() for k in (own, real)]
    found = unpaired_distance(x, y)
    assert found.value == pytest.approx(1000 * (sum(within) - 2 * cross.mean()))
    assert found.low < found.value < found.high


def test_the_inception_score_is_the_mean_over_splits_in_order() -> None:
    p = np.random.default_rng(8).dirichlet(np.ones(7), 60)
    parts = [
        np.exp((part * np.log(part / part.mean(0))).sum(1).mean()) for part in p.reshape(3, 20, 7)
    ]
    found = inception_score(np.log(p) + 5.0, splits=3)
    assert found.value == pytest.approx(np.mean(parts)) and found.low < found.value < found.high


def test_the_inception_score_of_sure_and_even_answers_is_the_number_of_classes() -> None:
    logits = 100.0 * np.eye(5)[np.arange(40) % 5]
    found = inception_score(logits, splits=1)
    assert found.value == pytest.approx(5.0)
    assert inception_score(np.zeros((20, 5)), splits=2).value == pytest.approx(1.0)


def brute(points: np.ndarray, centres: np.ndarray, k: int) -> float:
    inside = 0
    for point in points:
        for i, centre in enumerate(centres):
            others = sorted(
                float(np.linalg.norm(centre - o)) for j, o in enumerate(centres) if j != i
            )
            if np.linalg.norm(point - centre) <= others[k - 1]:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_are_those_of_brute_force(k: int) -> None:
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(25, 3)), 1.5 * rng.normal(size=(30, 3)) + 0.5
    precision, recall = precision_recall(x, y, k)
    assert precision.value == brute(x, y, k)
    assert recall.value == brute(y, x, k)
    assert 0 < recall.value < precision.value <= 1
    assert (precision.n, recall.n) == (25, 30)


def test_rows_taken_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(25, 3)), rng.normal(size=(30, 3)) + 0.5
    whole = precision_recall(x, y)
    monkeypatch.setattr("lantern_accel_profiles.quality.set_metrics.ROWS", 7)
    assert precision_recall(x, y) == whole


@pytest.mark.parametrize(
    ("work", "fragment"),
    [
        (lambda: Reference.of_features(np.zeros((1, 4))), "at least two images"),
        (lambda: Reference.of_features(np.full((3, 4), np.nan)), "not finite"),
        (lambda: FeatureSet(np.zeros((3, 4)), FIVE), "4 and of 5 dimensions"),
        (lambda: unpaired_distance(np.zeros((1, 4)), np.zeros((3, 4))), "at least two images"),
        (lambda: inception_score(np.zeros((19, 5))), "at least 20 images"),
        (lambda: precision_recall(np.zeros((3, 3)), np.zeros((9, 3))), "no 3-th nearest"),
    ],
)
def test_what_is_no_set_of_features_is_refused(work: Callable[[], object], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        work()
