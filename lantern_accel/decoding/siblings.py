"""Tries siblings where one of a window's first drafts is refused.

SJD-PAC's proactive drafting. Behind a replacement everything was drafted with the wrong past. A
sibling that is accepted in the refused draft's place was in the pass itself, so that the token after
it is drawn with the right past, and is kept for certain by the next pass. Exact like every such test: a
sibling is drawn from a distribution that is fixed before the pass, and tested against what the
refusals before it have left of the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.accept import entry_at, row_at
from lantern_accel.decoding.logits import Draws
from lantern_accel.device.operations import flags


class Siblings:
    """Draws and tries the siblings of a chain's first drafts; ``counts[d]`` of draft d + 1."""

    def __init__(
        self,
        counts: tuple[int, ...],
        index: torch.dtype,
        device: torch.device,
    ) -> None:
        self.counts, self.index = counts, index
        self.total = sum(counts)
        self.widest = max(counts, default=0)
        first = [sum(counts[:d]) for d in range(len(counts))]
        self.first = torch.tensor(first, dtype=index, device=device)
        self.number = torch.tensor(counts, dtype=index, device=device)

    def draft(self, x: Tensor, q: Tensor, uniforms: Tensor, drawing: Draws) -> Tensor:
        """Draw siblings ``[B, total]`` of drafts ``x [B, D]`` from ``q [B, D, V]`` without replacement.

        ``q``, of any sum, need not be what the drafts were drawn from; their codes are left out.
        """
        others = q.scatter(-1, x.unsqueeze(-1), 0.0)
        drawn = []
        for d, count in enumerate(self.counts):
            u = uniforms[:, sum(self.counts[:d]) :][:, :count]
            drawn.append(drawing.draw_without_replacement(others[:, d], u))
        return torch.cat(drawn, dim=1)

    def attempt(
        self,
        siblings: Tensor,
        x: Tensor,
        q: Tensor,
        left: Tensor,
        refused: Tensor,
        tokens: Tensor,
        after: Tensor,
        tests: Tensor,
        draws: Tensor,
        drawing: Draws,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Try the siblings of the first refused draft in the order in which they were drawn.

        ``siblings [B, total]``, ``x [B, D]`` and ``q [B, D, V]`` as in :meth:`draft`;
        ``left [B, V]``: the target's distribution after the refusal, of any sum; ``refused [B]``: which
        draft, from 0 on; ``tokens [B, L]`` without siblings; ``after [B, total, V]``: the target's
        distributions after the siblings; uniforms ``tests [B, widest]`` and ``draws [B, L]``.

        Returns the tokens ``[B, L]``, whether a sibling was accepted, bool ``[B]``, and the distribution
        that the token after one was drawn from, float32 ``[B, V]``.
        """
        has = refused < len(self.counts)
        place = refused.clamp(max=len(self.counts) - 1)
        first, number = self.first.index_select(0, place), self.number.index_select(0, place)
        others = row_at(q, place).scatter(-1, entry_at(x, place).unsqueeze(-1), 0.0)
        taken = flags(False, *has.shape, device=has.device)
        node = first
        for rank in range(self.widest):
            total = others.sum(-1, keepdim=True)
            others = others / total.clamp(min=1e-38)
            left = left / left.sum(-1, keepdim=True).clamp(min=1e-38)
            tried = has & ~taken & (rank < number)
            now = torch.where(tried, first + rank, first)
            code = entry_at(siblings, now)
            share, mass = entry_at(others, code), entry_at(left, code)
            kept = tried & (share > 0) & (tests[:, rank] * share < mass)
            rest = (left - others).clamp(min=0.0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left)
            failed = (tried & ~kept & (share > 0)).unsqueeze(-1)
            left = torch.where(failed, rest, left)
            others = torch.where(failed, others.scatter(-1, code.unsqueeze(-1), 0.0), others)
            node = torch.where(kept, now, node)
            taken = taken | kept
        here = refused.clamp(max=tokens.shape[1] - 2)
        # The replacement, now that its siblings' share is gone; then the token after an accepted one.
        replaced = drawing.draw(left, entry_at(draws, here))
        replaced = torch.where(taken, entry_at(siblings, node), replaced)
        following = row_at(after, node)
        then = drawing.draw(following, entry_at(draws, here + 1))
        order = torch.arange(tokens.shape[1], dtype=self.index, device=tokens.device)
        hit = (order == refused.unsqueeze(1)) & has.unsqueeze(1)
        tokens = torch.where(hit, replaced.unsqueeze(1), tokens)
        hit = (order == (refused + 1).unsqueeze(1)) & taken.unsqueeze(1)
        tokens = torch.where(hit, then.unsqueeze(1), tokens)
        return tokens, taken, following
