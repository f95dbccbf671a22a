"""The Inception score: how sure a classifier is of each image, and how evenly it sees all classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lantern_accel.quality.interval import Interval

Array = NDArray[np.float64]

RESAMPLES = 200


def inception_score(logits: NDArray[np.floating], splits: int = 10) -> Interval:
    """Return ``exp E KL(p(y|x) || p(y))`` of a classifier's logits ``[n, classes]``, mean over splits.

    Salimans et al., arXiv 1606.03498. Splits are consecutive, in the order of the prompts; a score of
    fewer images is smaller, so that splits belong to the protocol. The interval is a bootstrap over
    the images of each split, moved to have its mean at the measured value.
    """
    x = np.asarray(logits, dtype=np.float64)
    if x.ndim != 2 or len(x) < 2 * splits:
        raise ValueError(f"{splits} splits need at least {2 * splits} images, not {len(x)}")
    x = x - x.max(axis=1, keepdims=True)
    p = np.exp(x)
    total = p.sum(axis=1, keepdims=True)
    p, log_p = p / total, x - np.log(total)
    inner = (p * log_p).sum(axis=1)
    generator = np.random.default_rng(13)
    values, draws = [], []
    for part in np.array_split(np.arange(len(x)), splits):
        n = len(part)
        values.append(_scores(np.full((1, n), 1.0 / n), p[part], inner[part]))
        picks = generator.multinomial(n, np.full(n, 1.0 / n), RESAMPLES) / n
        draws.append(_scores(picks, p[part], inner[part]))
    value, drawn = float(np.mean(values)), np.mean(draws, axis=0)
    low, high = np.quantile(drawn - drawn.mean(), (0.025, 0.975))
    return Interval(value=value, low=value + float(low), high=value + float(high), n=len(x))


def _scores(weights: Array, p: Array, inner: Array) -> Array:
    """Return the score of each row of weights ``[r, n]`` that sum to one."""
    mean = weights @ p
    outer = (mean * np.log(mean.clip(min=1e-300))).sum(axis=1)
    scores: Array = np.exp(weights @ inner - outer)
    return scores
