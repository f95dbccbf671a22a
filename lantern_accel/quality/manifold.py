"""Precision and recall of generated images (Kynkaanniemi et al., arXiv 1904.06991).

A set's manifold is the union of balls about its features, each as wide as the distance to the k-th
nearest other feature. Precision is the share of generated images in the manifold of the real ones,
recall the share of real images in that of the generated ones.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_accel.quality.interval import Interval, mean

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
