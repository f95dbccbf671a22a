"""Compares sets of images by their features: KID, FID, the Inception score, precision and recall.

KID is the squared maximum mean discrepancy under the kernel ``(x.y / d + 1)^3`` (Binkowski et al.,
arXiv 1801.01401), unbiased at any number of images, so that a few dozen are enough where a Frechet
distance is not. Its unit here is 1e-3.

FID is ``|m - r|^2 + tr(S + R - 2 (S R)^(1/2))`` for the means and covariances of two sets (Heusel et al.,
arXiv 1706.08500). With n images it is too high by about a constant over n; the constant differs from
model to model. FID-infinity (Chong and Forsyth, arXiv 1911.07023) is the intercept of a line through
distances of ever fewer images against 1 / n.

Precision and recall (Kynkaanniemi et al., arXiv 1904.06991): a set's manifold is the union of balls about
its features, each as wide as the distance to the k-th nearest other feature. Precision is the share of
generated images in the manifold of the real ones, recall the share of real images in that of the
generated ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_accel_profiles.quality.interval import RESAMPLES, Array, Interval, interval, mean

METRIC = "KID x 1000"
SCALE = 1000.0
PERMUTATIONS = 2000
#: Of sets of thousands of images.
FEW_RESAMPLES = 200


def kernel_distance(first: Array, second: Array) -> Interval:
    """Return the KID of features ``[n, d]`` and its bootstrap interval over images.

    Image i of both sets has the same prompt. The sum runs over pairs of different i (Gretton et al.
    2012, equation 4), so that neither an image and itself nor two images of one row are compared; a
    resampled image is not paired with its copy either, which would bias the interval.
    """
    h = _differences(first, second)
    n = len(h)
    value = SCALE * h.sum() / (n * (n - 1))
    picks = np.random.default_rng(5).integers(0, n, (RESAMPLES, n))
    counts = np.stack([np.bincount(row, minlength=n) for row in picks]).astype(np.float64)
    pairs = n**2 - (counts**2).sum(axis=1)
    counts, pairs = counts[pairs > 0], pairs[pairs > 0]
    draws = SCALE * np.einsum("bi,ij,bj->b", counts, h, counts, optimize=True) / pairs
    return interval(value, draws, n)


def permutation_test(first: Array, second: Array) -> tuple[float, float]:
    """Return the p-value of "both sets are alike", and the distance that this many images can find.

    If they are alike, the two images of a prompt may change places, which turns the sign of their row
    and column in the sum of :func:`kernel_distance`. The one-sided p-value is the share of
    :data:`PERMUTATIONS` such draws (the measured one counted) with a distance as large. The second
    figure, in the unit of :func:`kernel_distance`, is found in four of five cases at p < 0.05: the draws'
    95th percentile and 0.84 standard deviations of the measured distance, taken from its interval.
    """
    h = _differences(first, second)
    n = len(h)
    signs = np.random.default_rng(7).choice(np.array([-1.0, 1.0]), (PERMUTATIONS - 1, n))
    draws = np.einsum("bi,ij,bj->b", signs, h, signs, optimize=True)
    p_value = (1 + int((draws >= h.sum() - 1e-12).sum())) / PERMUTATIONS
    found = kernel_distance(first, second)
    deviation = (found.high - found.low) / (2 * 1.96)
    critical = SCALE * float(np.quantile(draws, 0.95)) / (n * (n - 1))
    return p_value, critical + 0.84 * deviation


def unpaired_distance(first: Array, second: Array) -> Interval:
    """Return the KID of generated features ``[n, d]`` to real ones ``[m, d]`` that no prompt pairs.

    Unbiased over all pairs: the expected value of the libraries' mean over random subsets, without
    their noise. The interval is a bootstrap over generated images, an image not paired with its copy.
    """
    n, m = len(first), len(second)
    if min(n, m) < 2 or first.shape[1] != second.shape[1]:
        raise ValueError(f"two sets of at least two images, not {first.shape} and {second.shape}")
    own, real = _kernel(first, first), _kernel(second, second)
    np.fill_diagonal(own, 0.0)
    across = _kernel(first, second).mean(axis=1)
    fixed = (real.sum() - np.trace(real)) / (m * (m - 1))
    value = SCALE * (own.sum() / (n * (n - 1)) + fixed - 2.0 * across.mean())
    draws = []
    for counts in np.random.default_rng(5).multinomial(n, np.full(n, 1.0 / n), FEW_RESAMPLES):
        pairs = n**2 - (counts.astype(np.float64) ** 2).sum()
        if pairs > 0:
            draws.append(counts @ own @ counts / pairs + fixed - 2.0 * counts @ across / n)
    return interval(value, SCALE * np.array(draws), n)


def _differences(first: Array, second: Array) -> Array:
    """Return what each pair of prompts adds to the distance, ``[n, n]``, nothing on the diagonal."""
    n = len(first)
    if n < 2 or first.shape != second.shape:
        raise ValueError(f"two sets of at least two images, not {first.shape} and {second.shape}")
    cross = _kernel(first, second)
    h: Array = _kernel(first, first) + _kernel(second, second) - cross - cross.T
    np.fill_diagonal(h, 0.0)
    return h


def _kernel(x: Array, y: Array) -> Array:
    product: Array = (x @ y.T / x.shape[1] + 1.0) ** 3
    return product


# --- FID -------------------------------------------------------------------------------------------

#: Resamples of the interval: each needs the eigenvalues of a matrix of up to 2048 rows.
FID_RESAMPLES = 100
#: Sizes of the subsets through which the line is drawn, from half the images to all of them.
POINTS = 15


@dataclass(frozen=True)
class Reference:
    """What real features are known by: mean ``[d]``, and a factor ``F [m, d]`` with covariance F'F."""

    mean: Array
    factor: Array

    @classmethod
    def of_features(cls, features: NDArray[np.floating]) -> Reference:
        """Return the moments of features ``[n, d]``; the covariance is over n - 1."""
        x = np.asarray(features, dtype=np.float64)
        n, d = _check(x).shape
        mean = x.mean(axis=0)
        centred = (x - mean) / np.sqrt(n - 1)
        # The factor is read for each resample, so it has no more rows than it must.
        factor = centred if n <= d else _root(centred.T @ centred)
        return cls(mean, factor)

    @classmethod
    def of_moments(cls, mean: Array, covariance: Array) -> Reference:
        """Return a reference from a stored mean ``[d]`` and covariance ``[d, d]``."""
        mean, covariance = (np.asarray(x, dtype=np.float64) for x in (mean, covariance))
        return cls(mean, _root(covariance))


class FeatureSet:
    """Features ``[n, d]`` of generated images, ready for distances of many of their subsets."""

    def __init__(self, features: NDArray[np.floating], reference: Reference) -> None:
        x = np.asarray(features, dtype=np.float64)
        if _check(x).shape[1] != len(reference.mean):
            raise ValueError(f"features of {x.shape[1]} and of {len(reference.mean)} dimensions")
        # About the reference's mean: small numbers, and the same distance.
        self._x = x - reference.mean
        self._seen = self._x @ reference.factor.T
        self._squares = np.square(self._x).sum(axis=1)
        self._trace = float(np.square(reference.factor).sum())

    def __len__(self) -> int:
        return len(self._x)

    def distance(self, counts: Array | None = None) -> float:
        """Return the distance; ``counts [n]`` says how often each image is there, all once if None."""
        c = np.ones(len(self)) if counts is None else np.asarray(counts, dtype=np.float64)
        there = c > 0
        c, x = c[there], self._x[there]
        n = c.sum()
        mean = c @ x / n
        trace = (c @ self._squares[there] - n * mean @ mean) / (n - 1)
        seen = self._seen[there]
        seen = np.sqrt(c)[:, None] * (seen - c @ seen / n) / np.sqrt(n - 1)
        # The trace of (S R)^(1/2) is the sum of the singular values of one factor times the other.
        gram = seen @ seen.T if len(seen) <= seen.shape[1] else seen.T @ seen
        cross = np.sqrt(np.linalg.eigvalsh(gram).clip(min=0.0)).sum()
        return float(mean @ mean + trace + self._trace - 2.0 * cross)


def frechet(
    features: NDArray[np.floating], reference: Reference, resamples: int = FID_RESAMPLES
) -> tuple[Interval, Interval]:
    """Return FID of features ``[n, d]`` to a reference, and FID-infinity, with 95 % intervals.

    The interval is a bootstrap over generated images. A resample has fewer different images and with
    them a larger bias, so that the draws are moved to have their mean at the measured value. That of
    FID-infinity has the same spread and the standard error of the line; the reference is taken as it
    is, so that the bias of a small one remains.
    """
    sample = FeatureSet(features, reference)
    n = len(sample)
    value = sample.distance()
    generator = np.random.default_rng(11)
    draws = np.array(
        [
            sample.distance(
                np.bincount(generator.integers(0, n, n), minlength=n).astype(np.float64)
            )
            for _ in range(resamples)
        ]
    )
    sizes = np.unique(np.linspace(max(2, n // 2), n, POINTS).round().astype(int))
    found = [
        sample.distance(np.isin(np.arange(n), generator.permutation(n)[:size]).astype(np.float64))
        for size in sizes
    ]
    # Where the least-squares line meets 1 / n = 0, and its standard error.
    limit, error = found[-1], 0.0
    if len(sizes) > 2:
        (_, limit), covariance = np.polyfit(1.0 / sizes, found, 1, cov=True)
        error = np.sqrt(covariance[1, 1])
    spread = 1.96 * float(np.hypot(draws.std(), error))
    infinity = Interval(value=float(limit), low=limit - spread, high=limit + spread, n=n)
    return interval(value, value + draws - draws.mean(), n), infinity


def _root(covariance: Array) -> Array:
    """Return the symmetric square root of a covariance."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2.0)
    root: Array = (vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T
    return root


def _check(x: Array) -> Array:
    if x.ndim != 2 or len(x) < 2:
        raise ValueError(f"features of at least two images, [n, d], not {list(x.shape)}")
    if not np.isfinite(x).all():
        raise ValueError("features that are not finite")
    return x


# --- the Inception score ---------------------------------------------------------------------------


def inception_score(logits: NDArray[np.floating], splits: int = 10) -> Interval:
    """Return ``exp E KL(p(y|x) || p(y))`` of a classifier's logits ``[n, classes]``, mean over splits.

    Salimans et al., arXiv 1606.03498. Splits are consecutive, in the order of the prompts; a score of
    fewer images is smaller, so that splits belong to the protocol. The interval is a bootstrap over
    the images of each split, moved to have its mean at the measured value.
    """
    x = np.asarray(logits, dtype=np.float64)
    if x.ndim != 2 or len(x) < 2 * splits:
        raise ValueError(f"{splits} splits need at least {2 * splits} images, not {len(x)}")
    log_p = torch.from_numpy(x).log_softmax(1).numpy()
    p = np.exp(log_p)
    inner = (p * log_p).sum(axis=1)
    generator = np.random.default_rng(13)
    values, draws = [], []
    for part in np.array_split(np.arange(len(x)), splits):
        n = len(part)
        values.append(_scores(np.full((1, n), 1.0 / n), p[part], inner[part]))
        picks = generator.multinomial(n, np.full(n, 1.0 / n), FEW_RESAMPLES) / n
        draws.append(_scores(picks, p[part], inner[part]))
    value, drawn = float(np.mean(values)), np.mean(draws, axis=0)
    return interval(value, value + drawn - drawn.mean(), len(x))


def _scores(weights: Array, p: Array, inner: Array) -> Array:
    """Return the score of each row of weights ``[r, n]`` that sum to one."""
    mean = weights @ p
    outer = (mean * np.log(mean.clip(min=1e-300))).sum(axis=1)
    scores: Array = np.exp(weights @ inner - outer)
    return scores


# --- precision and recall --------------------------------------------------------------------------

#: Rows of the distance matrix at once.
ROWS = 1000


def precision_recall(
    generated: NDArray[np.floating], real: NDArray[np.floating], k: int = 3
) -> tuple[Interval, Interval]:
    """Return precision and recall of features ``[n, d]`` and ``[m, d]``, with 95 % intervals.

    The intervals are bootstraps over generated images (precision) and over real ones (recall); the
    manifold that they are tested against is taken as it is. Raises ValueError for k images or fewer.
    """
    fake, truth = (torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in (generated, real))
    inside = _within(fake, truth, _radii(truth, k))
    covered = _within(truth, fake, _radii(fake, k))
    return mean(inside.double().tolist()), mean(covered.double().tolist())


def _radii(features: Tensor, k: int) -> Tensor:
    """Return the distance of each feature to its k-th nearest other one, ``[n]``."""
    if len(features) <= k:
        raise ValueError(f"{len(features)} images have no {k}-th nearest neighbour each")
    found = []
    for start in range(0, len(features), ROWS):
        gap = torch.cdist(features[start : start + ROWS], features)
        gap[torch.arange(len(gap)), torch.arange(start, start + len(gap))] = torch.inf
        found.append(gap.kthvalue(k, dim=1).values)
    return torch.cat(found)


def _within(points: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    """Return whether each point lies in one of the balls, bool ``[n]``."""
    rows = [torch.cdist(part, centres) <= radii for part in torch.split(points, ROWS)]
    return torch.cat([row.any(dim=1) for row in rows])
