"""The Frechet distance of two sets of features (FID), its interval, and its value without bias.

FID is ``|m - r|^2 + tr(S + R - 2 (S R)^(1/2))`` for the means and covariances of two sets (Heusel et al.,
arXiv 1706.08500). With n images it is too high by about a constant over n; the constant differs from
model to model. FID-infinity (Chong and Forsyth, arXiv 1911.07023) is the intercept of a line through
distances of ever fewer images against 1 / n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lantern_accel.quality.interval import Interval

Array = NDArray[np.float64]

#: Resamples of the interval: each needs the eigenvalues of a matrix of up to 2048 rows.
RESAMPLES = 100
#: Sizes of the subsets through which the line is drawn, from half the images to all of them.
POINTS = 15


@dataclass(frozen=True)
class Reference:
    """What real features are known by: mean ``[d]``, and a factor ``F [m, d]`` with covariance F'F.

    ``count``: images behind them; None where only the moments were given.
    """

    mean: Array
    factor: Array
    count: int | None

    @classmethod
    def of_features(cls, features: NDArray[np.floating]) -> Reference:
        """Return the moments of features ``[n, d]``; the covariance is over n - 1."""
        x = np.asarray(features, dtype=np.float64)
        n, d = _checked(x).shape
        mean = x.mean(axis=0)
        centred = (x - mean) / np.sqrt(n - 1)
        # The factor is read for each resample, so it has no more rows than it must.
        factor = centred if n <= d else _root(centred.T @ centred)
        return cls(mean, factor, n)

    @classmethod
    def of_moments(cls, mean: Array, covariance: Array) -> Reference:
        """Return a reference from a stored mean ``[d]`` and covariance ``[d, d]``."""
        covariance = np.asarray(covariance, dtype=np.float64)
        return cls(np.asarray(mean, dtype=np.float64), _root(covariance), None)

    @property
    def trace(self) -> float:
        """The trace of the covariance."""
        return float(np.square(self.factor).sum())


class Sample:
    """Features ``[n, d]`` of generated images, ready for distances of many of their subsets."""

    def __init__(self, features: NDArray[np.floating], reference: Reference) -> None:
        x = np.asarray(features, dtype=np.float64)
        if _checked(x).shape[1] != len(reference.mean):
            raise ValueError(f"features of {x.shape[1]} and of {len(reference.mean)} dimensions")
        # About the reference's mean: small numbers, and the same distance.
        self._x = x - reference.mean
        self._seen = self._x @ reference.factor.T
        self._squares = np.square(self._x).sum(axis=1)
        self._trace = reference.trace

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


@dataclass(frozen=True)
class Frechet:
    """FID at all images, and extrapolated to endlessly many; the bias is the difference."""

    value: Interval
    infinity: Interval

    @property
    def bias(self) -> float:
        """How much of the value comes from the number of images, by the extrapolation."""
        return self.value.value - self.infinity.value


def frechet(
    features: NDArray[np.floating],
    reference: Reference,
    resamples: int = RESAMPLES,
    points: int = POINTS,
) -> Frechet:
    """Return the distance of features ``[n, d]`` to a reference, with 95 % intervals.

    The interval is a bootstrap over generated images. A resample has fewer different images and with
    them a larger bias, so that the draws are moved to have their mean at the measured value. That of
    FID-infinity has the same spread and the standard error of the line; the reference is taken as it
    is, so that the bias of a small one remains.
    """
    sample = Sample(features, reference)
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
    low, high = np.quantile(draws - draws.mean(), (0.025, 0.975))
    sizes = np.unique(np.linspace(max(2, n // 2), n, points).round().astype(int))
    found = [
        sample.distance(np.isin(np.arange(n), generator.permutation(n)[:size]).astype(np.float64))
        for size in sizes
    ]
    limit, error = _intercept(1.0 / sizes, np.array(found))
    spread = 1.96 * float(np.hypot(draws.std(), error))
    return Frechet(
        Interval(value=value, low=value + float(low), high=value + float(high), n=n),
        Interval(value=limit, low=limit - spread, high=limit + spread, n=n),
    )


def _intercept(x: Array, y: Array) -> tuple[float, float]:
    """Return where the least-squares line meets x = 0, and its standard error."""
    if len(x) < 3:
        return float(y[-1]), 0.0
    gap = x - x.mean()
    slope = float(gap @ (y - y.mean()) / (gap @ gap))
    limit = float(y.mean() - slope * x.mean())
    left = y - (limit + slope * x)
    variance = float(left @ left) / (len(x) - 2)
    return limit, float(np.sqrt(variance * (1.0 / len(x) + x.mean() ** 2 / (gap @ gap))))


def _root(covariance: Array) -> Array:
    """Return the symmetric square root of a covariance."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2.0)
    root: Array = (vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T
    return root


def _checked(x: Array) -> Array:
    if x.ndim != 2 or len(x) < 2:
        raise ValueError(f"features of at least two images, [n, d], not {list(x.shape)}")
    if not np.isfinite(x).all():
        raise ValueError("features that are not finite")
    return x
