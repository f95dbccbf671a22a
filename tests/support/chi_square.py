"""Goodness of fit without scipy."""

from __future__ import annotations

import torch
from torch import Tensor


def misfit(observed: Tensor, expected: Tensor) -> float:
    """Return by how many standard deviations counts miss their distribution (about N(0, 1)).

    ``observed`` counts and ``expected`` probabilities over the same cells. Cells that expect fewer
    than 5 are pooled; counts where nothing is expected are an infinite misfit. Wilson and Hilferty's
    approximation of the chi-square distribution.
    """
    observed, expected = observed.flatten().double(), expected.flatten().double()
    total = observed.sum()
    if observed[expected <= 0].any():
        return float("inf")
    counts = expected / expected.sum() * total
    rare = counts < 5
    chi2 = ((observed - counts).square() / counts)[~rare].sum()
    cells = int((~rare).sum())
    pooled = counts[rare].sum()
    if pooled >= 5:
        chi2 = chi2 + (observed[rare].sum() - pooled).square() / pooled
        cells += 1
    freedom = cells - 1
    spread = 2 / (9 * freedom)
    return float(((chi2 / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def drawn_fairly(laws: Tensor, tokens: Tensor) -> None:
    """Compare how often each code was drawn with what the laws ``[n, V]`` of ``n`` draws expect."""
    assert laws.gather(1, tokens.view(-1, 1)).gt(0).all(), "a token that the law excludes was drawn"
    seen = torch.zeros_like(laws).scatter_(1, tokens.view(-1, 1), 1.0).sum(0)
    spread = (laws * (1 - laws)).sum(0)
    often = spread > 3
    z = (seen - laws.sum(0))[often] / spread[often].sqrt()
    assert len(z) > 5 and z.abs().max() < 5.0
    assert 0.2 < float(z.square().mean()) < 2.5
    logs = laws.clamp_min(torch.finfo(laws.dtype).tiny).log()  # a law that is too flat or too sharp
    mean, square = (laws * logs).sum(-1), (laws * logs.square()).sum(-1)
    said = logs.gather(1, tokens.view(-1, 1)).sum()
    assert abs(said - mean.sum()) < 5 * (square - mean.square()).sum().sqrt()
