"""Fuses a token and the target's states into one feature, as every EAGLE drafter begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.transformer import Projection, RMSNorm


def check_taps(taps: Sequence[int]) -> None:
    """Raise ValueError for blocks that are not counted from 1, each once, ascending."""
    if list(taps) != sorted(set(taps)) or any(tap < 1 for tap in taps):
        raise ValueError(f"taps {list(taps)} must be numbers from 1 up, each once, ascending")


class Fusion(nn.Module):
    """A drafter that reads states of several of its target's blocks (EAGLE-3), or the last alone.

    ``config`` has ``dim``, ``norm_eps``, ``taps`` and ``bias`` (of ``fc``).
    """

    config: Any
    ops: TensorOps
    tap_norms: nn.ModuleList
    fuse: Projection | None
    fc: Projection

    def make_fusion(self) -> None:
        """Make the layers that :meth:`fused` and :meth:`joined` read."""
        c = self.config
        self.tap_norms = nn.ModuleList(RMSNorm(c.dim, c.norm_eps) for _ in c.taps)
        wide = (len(c.taps) + 1) * c.dim
        self.fuse = Projection(wide, c.dim, bias=False) if c.taps else None
        self.fc = Projection(2 * c.dim, c.dim, bias=c.bias)

    @property
    def taps(self) -> tuple[int, ...]:
        """Blocks of the target whose states :meth:`fused` takes."""
        taps: tuple[int, ...] = self.config.taps
        return taps

    def fused(self, features: Tensor) -> Tensor:
        """Return the target's states ``[R, T, (taps + 1) D]`` as one feature ``[R, T, D]``.

        What has the width of one already, such as the drafter's own predictions, stays as it is.
        """
        if self.fuse is None or features.shape[-1] == self.config.dim:
            return features
        *tapped, last = torch.split(features, self.config.dim, dim=-1)
        normed = [norm(x, self.ops) for norm, x in zip(self.tap_norms, tapped, strict=True)]
        out: Tensor = self.fuse(torch.cat((*normed, last), dim=-1), self.ops)
        return out

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return what the blocks read, ``[R, T, D]``, of embedded tokens and the target's states."""
        out: Tensor = self.fc(torch.cat((embedded, self.fused(features)), dim=-1), self.ops)
        return out

    @torch.no_grad()
    def start(self) -> None:
        """Draw the first weights: "the next feature resembles this one"."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and "norm" not in name:  # norms of heads have a row a head
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(weight, std=0.01)
        width = self.config.dim
        self.fc.weight[:, width:].add_(torch.eye(width))
        if self.fuse is not None:  # ... which is the last of the target's states
            self.fuse.weight[:, -width:] = torch.eye(width)
