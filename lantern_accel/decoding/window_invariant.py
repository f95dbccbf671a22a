"""Compares a window's drafts with the tokens that the seed decides, which take their places.

Nothing is tested and nothing is drawn from what is left, so that a draft needs no distribution: it is any
guess. Behind a draft that is refused every position becomes what its row chooses, and where an earlier
pass had seen the token that is now on the left, what it chose there is the better guess.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.maximal_coupling import Coupled, compare, leading
from lantern_accel.decoding.window_base import WindowBase


class InvariantWindow:
    """Chooses tokens by noise, or the likeliest, and drafts by the same noise."""

    def __init__(self, engine: WindowBase) -> None:
        e = self.engine = engine
        self.recall = e.row_cache()
        self.depths = e.forward.depths[e.window.length :].clone()

    def _choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of ``positions [B, T]``; keep the rows of a window's first ones."""
        e = self.engine
        if e.greedy:
            e.finite.note(logits)
            return e.choices.of_logits(logits, positions)
        p = distribution(logits, e.filters)
        e.finite.note(p)
        if e.geometry.kept:
            count = min(e.window.length, positions.shape[1])
            e.ring.write(e.state.q, positions[:, :count], p[:, :count])
        return e.choices.of(p, positions)

    def fresh(self, newest: Tensor, back: int = 0) -> None:
        """Draft what is behind ``newest [B]``, the last position that a pass has seen."""
        e = self.engine
        state, fresh = e.state, e.fresh
        targets = fresh.targets(newest)
        left, above = fresh.sources(newest)
        places = targets.clamp(max=e.geometry.tokens)
        if fresh.copies or (e.greedy and fresh.reads):
            state.tokens.scatter_(1, places, state.tokens.gather(1, fresh.near(left, above)))
            return
        if e.greedy:
            return
        rows = fresh.rows(e.rows_of(left, above), targets)
        state.tokens.scatter_(1, places, e.choices.of(rows, targets))
        if e.siblings.total:
            e.ring.write(state.q, targets, rows)

    def propose(self, x: Tensor, chain: Tensor) -> tuple[Tensor, Tensor] | None:
        """Draft siblings ``[B, total]`` of ``x [B, L - 1]``, who come next in the race of their place."""
        e = self.engine
        if not e.siblings.total:
            return None
        counts = e.siblings.counts
        rows = e.sibling_rows(chain)
        rows = rows.scatter(-1, x[:, : len(counts)].unsqueeze(-1), 0.0)
        found = e.choices.ranked(rows, chain[:, 1 : 1 + len(counts)], e.siblings.widest)
        return torch.cat([found[:, d, :count] for d, count in enumerate(counts)], dim=1), rows

    def decide(
        self, window: Tensor, chain: Tensor, logits: Tensor, others: tuple[Tensor, Tensor] | None
    ) -> Coupled:
        """Compare the drafts with the tokens that are chosen, which take their places."""
        e = self.engine
        state, length = e.state, e.window.length
        if length == 1:  # there is nothing to compare
            return Coupled(self._choose(logits, chain + 1), e.ahead, None)
        x = window[:, 1:]
        if e.greedy and e.rule.relaxed:
            e.finite.note(logits)
            return compare(x, logits, e.rule)
        chosen = self._choose(logits, state.length.unsqueeze(1) + 1 + e.forward.depths)
        tokens, taken = chosen[:, :length], None
        count = leading(x == tokens[:, :-1], x.dtype)
        if others is not None:
            tokens, taken = self._siblings(tokens, count, others[0], chosen[:, length:])
        if self.recall is not None:
            tokens = self._recalled(window, tokens, count + 1, taken)
        return Coupled(tokens, count + 1, torch.zeros(x.shape, device=x.device))

    def _siblings(
        self, tokens: Tensor, refused: Tensor, codes: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take what follows the sibling that is the token chosen in place of draft ``refused [B]``."""
        here = refused.clamp(max=tokens.shape[1] - 2).unsqueeze(1)
        hit = (self.depths - 1 == refused.unsqueeze(1)) & (codes == tokens.gather(1, here))
        taken = hit.any(dim=1)
        node = hit.to(torch.int32).argmax(dim=1, keepdim=True).to(tokens.dtype)
        then = torch.where(taken.unsqueeze(1), after.gather(1, node), tokens.gather(1, here + 1))
        return tokens.scatter(1, here + 1, then), taken

    def _recalled(
        self, window: Tensor, tokens: Tensor, first: Tensor, taken: Tensor | None
    ) -> Tensor:
        """Take what earlier passes chose behind tokens that this one did not see; note what it chose.

        ``window [B, L]``: what the pass saw; ``tokens [B, L]``: what it chose; ``first [B]``: the first
        of these that is not known.
        """
        e, state = self.engine, self.engine.state
        assert self.recall is not None
        chosen = e.ops.held(state.row_tokens).flatten(1)
        behind = e.ahead > first.unsqueeze(1)
        if taken is not None:
            behind = behind & ~(taken.unsqueeze(1) & (e.ahead == first.unsqueeze(1) + 1))
        left = torch.cat((window[:, :1], tokens[:, :-1]), dim=1)
        earlier = torch.cat((window[:, :1], left[:, :-1]), dim=1)
        places = state.length.unsqueeze(1) + e.ahead
        entry, found = self.recall.find(state, places, left, earlier)
        recalled = torch.where(behind & (left != window) & found, chosen.gather(1, entry), tokens)
        self.recall.write(state, places, window, state.row_tokens, tokens)
        return recalled
