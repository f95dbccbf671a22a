"""Moving averages: of weights, and of a codebook's latents on the unit sphere, with restarts.

Source of the latter: VQ-VAE (arXiv 1711.00937), appendix A.1. Codes that nothing chooses are
restarted at latents that are badly quantised, so that all of them come into use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.nn.vq import VQModel


def move_average(
    average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float, index: int
) -> None:
    """Move averages of weights towards them after step ``index``; the first steps count for more."""
    with torch.no_grad():
        for name, value in average.items():
            value.lerp_(weights[name], 1 - min(decay, (2 + index) / (11 + index)))


class CodebookAverage:
    """The codebook as a moving average of the latents that chose each code, on the sphere."""

    def __init__(self, model: VQModel, decay: float, dead_below: float) -> None:
        rows = model.quantize.embedding.weight
        self._rows = rows
        self._decay, self._dead_below = decay, dead_below
        self.counts = torch.ones(len(rows), device=rows.device)
        self.sums = F.normalize(rows.detach().float(), dim=-1).clone()

    @torch.no_grad()
    def start(self, latents: Tensor, generator: torch.Generator) -> None:
        """Place every code on one of ``latents [n, d]`` (unit length), spread by k-means++."""
        size = len(self._rows)
        nearest = torch.full((len(latents),), 4.0, device=latents.device)
        rows = []
        for _ in range(size):
            chosen = torch.multinomial(nearest.clamp_min(1e-6).cpu(), 1, generator=generator)
            row = latents[chosen.to(latents.device)]
            rows.append(row)
            nearest = torch.minimum(nearest, 2.0 - 2.0 * (latents @ row[0]))
        self._rows.copy_(torch.cat(rows))
        self.sums.copy_(self._rows)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def update(self, latents: Tensor, codes: Tensor, generator: torch.Generator) -> int:
        """Take in unit latents ``[n, d]`` and codes ``[n]``; return how many codes restarted."""
        size, decay = len(self._rows), self._decay
        uses = torch.bincount(codes, minlength=size).to(latents)
        sums = torch.zeros_like(self.sums).index_add_(0, codes, latents)
        self.counts.mul_(decay).add_(uses, alpha=1.0 - decay)
        self.sums.mul_(decay).add_(sums, alpha=1.0 - decay)
        self._rows.copy_(F.normalize(self.sums, dim=-1))
        dead = (self.counts < self._dead_below).nonzero()[:, 0]
        if len(dead):
            error = 2.0 - 2.0 * (latents * self._rows[codes]).sum(-1)
            weights = error.clamp_min(1e-6).cpu()
            count = min(len(dead), len(latents))
            chosen = torch.multinomial(weights, count, generator=generator).to(latents.device)
            dead = dead[:count]
            self._rows[dead] = latents[chosen]
            self.counts[dead] = 1.0 - decay + 4.0 * self._dead_below
            self.sums[dead] = latents[chosen] * self.counts[dead, None]
        return len(dead)
