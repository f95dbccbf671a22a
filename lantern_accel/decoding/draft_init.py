"""Initialises drafts: what a position's first draft is sampled from, before any pass has seen it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lantern_accel.decoding.rows import Allowed
from lantern_accel.strategy.values import Fresh

#: Of a window whose drafts another source writes, all of them before any is read.
GIVEN: Literal["given"] = "given"


class DraftInitializer:
    """Chooses, for the ``count`` positions behind the newest that was seen, where drafts come from.

    ``tokens`` of the image, ``width`` of them from one position to the one below. Where its rows are not
    all alike, ``up`` has for every token the one above it, -1 where there is none. ``allowed``: the codes
    that a token may be. Codes that are not allowed are sampled by no draft.
    """

    def __init__(
        self,
        kind: Fresh | Literal["given"],
        count: int,
        tokens: int,
        width: int,
        vocab: int,
        allowed: Allowed | None,
        index: torch.dtype,
        device: torch.device,
        up: Sequence[int] | None = None,
    ) -> None:
        self.kind, self.tokens, self.width = kind, tokens, width
        #: Whether a draft depends on the position one row above.
        self.reads = kind == "above"
        self.narrowest = width
        self.up: Tensor | None = None
        if up is not None:
            self.up = torch.tensor(up, dtype=index, device=device)
            gaps = [n - above for n, above in enumerate(up) if above >= 0]
            self.narrowest, self.width = min(gaps, default=width), max(gaps, default=width)
        #: Positions back from a fresh one whose distributions are read.
        self.reach = self.width if self.reads else 0
        self.ahead = torch.arange(1, count + 1, dtype=index, device=device)
        self.uniform = torch.full((1, vocab), 1.0 / vocab, device=device)
        self.open: Tensor | None = None
        self.kinds: Tensor | None = None
        if allowed is not None:
            self.open = (allowed.penalty == 0).float()
            self.uniform = self.open / self.open.sum(-1, keepdim=True)
            self.kinds = allowed.kind

    def targets(self, newest: Tensor) -> Tensor:
        """Return the fresh positions, ``[B, count]``; ``newest [B]`` is the last that was seen."""
        return newest.unsqueeze(1) + self.ahead

    def above(self, positions: Tensor) -> Tensor:
        """Return the positions one row above ``positions [B, T]``; negative where there is none."""
        if self.up is None:
            return positions - self.width
        inside = positions.clamp(min=0, max=self.tokens - 1)
        up = self.up.index_select(0, inside.flatten()).view(inside.shape)
        return torch.where(positions < 0, positions, up)

    def sources(self, newest: Tensor) -> Tensor:
        """Return the positions ``[B, count]`` that were seen, one row above the fresh ones or more."""
        last = newest.clamp(max=self.tokens - 1).unsqueeze(1)
        target = self.targets(newest).clamp(max=self.tokens - 1)
        above = self.above(target)
        for _ in range(len(self.ahead) // self.narrowest):  # a window of several rows
            above = torch.where(above > last, self.above(above), above)
        # The first row has nothing above it.
        return torch.where(above < 0, last, above.clamp(min=0))

    def rows(self, given: Tensor | None, targets: Tensor) -> Tensor:
        """Return the distributions of fresh drafts, float32 ``[B, count, V]``.

        ``given``: those of their sources, None for the uniform one.
        """
        shape = (*targets.shape, -1)
        if self.kinds is None:
            return self.uniform.expand(*shape) if given is None else given
        assert self.open is not None
        kind = self.kinds.index_select(0, targets.clamp(max=self.tokens - 1).flatten())
        even = self.uniform.index_select(0, kind).view(shape)
        if given is None:
            return even
        given = given * self.open.index_select(0, kind).view(shape)
        total = given.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, given / total.clamp(min=1e-38), even)
