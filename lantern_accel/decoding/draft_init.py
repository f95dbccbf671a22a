"""Initialises drafts: what a position's first draft is sampled from, before any pass has seen it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.target import Target
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.sources import Fresh

#: Another source fills the whole window before the step reads it.
GIVEN: Literal["given"] = "given"


def row_width(target: Target) -> int:
    """Return the most tokens from a position to the one below it."""
    above = target.config.above or ()
    gaps = [n - up for n, up in enumerate(above) if up >= 0]
    return max(gaps, default=target.config.row_tokens)


class DraftInitializer:
    """Chooses, for the positions of a step behind the newest that was seen, where drafts come from.

    ``kind``: what they are sampled from. ``up``: of every token the one above it, -1 where there is none;
    None where all rows are as wide. Codes that are not allowed are sampled by no draft.
    """

    def __init__(
        self, kind: Fresh | Literal["given"], g: Geometry, target: Target, ops: TensorOps
    ) -> None:
        self.kind, self.tokens, self.width = kind, g.tokens, row_width(target)
        device, index = target.weight.device, ops.index
        #: Whether a draft depends on the position one row above.
        self.reads = kind == "above"
        self.ahead = torch.arange(1, g.depth + 1, dtype=index, device=device)
        above = target.config.above
        self.up = None if above is None else torch.tensor(above, dtype=index, device=device)
        if self.reads:
            up = np.arange(g.tokens) - self.width if above is None else np.array(above)
            last = np.arange(g.tokens)[:, None]
            source = up[np.minimum(last + np.arange(1, g.depth + 1), g.tokens - 1)]
            while (unseen := source > last).any():  # a window of several rows
                source = np.where(unseen, up[np.maximum(source, 0)], source)
            # The first row has nothing above it.
            source = np.where(source < 0, last, source)
            self._source = torch.tensor(source, dtype=index, device=device)
        self.uniform = torch.full((1, g.vocab), 1.0 / g.vocab, device=device)
        allowed = target.allowed_codes()
        self.kinds = None if allowed is None else allowed.kind
        self.open = None if allowed is None else (allowed.penalty == 0).float()
        if self.open is not None:
            self.uniform = self.open / self.open.sum(-1, keepdim=True)

    def sources(self, newest: Tensor) -> Tensor:
        """Return the positions seen one row or more above those behind ``newest [B]``: ``[B, depth]``."""
        return self._source.index_select(0, newest.clamp(max=self.tokens - 1))

    def rows(self, given: Tensor | None, targets: Tensor) -> Tensor:
        """Return the distributions of fresh drafts, float32 ``[B, count, V]``.

        ``given``: those of their sources, None for the uniform one.
        """
        shape = (*targets.shape, -1)
        if self.kinds is None or self.open is None:
            return self.uniform.expand(*shape) if given is None else given
        kind = self.kinds.index_select(0, targets.clamp(max=self.tokens - 1).flatten())
        even = self.uniform.index_select(0, kind).view(shape)
        if given is None:
            return even
        given = given * self.open.index_select(0, kind).view(shape)
        total = given.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, given / total.clamp(min=1e-38), even)
