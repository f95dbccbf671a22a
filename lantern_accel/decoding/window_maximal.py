"""Draws, tests and replaces a window's drafts by uniforms: the papers' coupling.

Source: SJD (arXiv 2410.01699), SCD (2510.24211), SJD-PAC. What the tests say is in
:mod:`~.maximal_coupling`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.maximal_coupling import Coupled, couple
from lantern_accel.decoding.pricing import window_prices
from lantern_accel.decoding.siblings import Tried
from lantern_accel.decoding.window_base import WindowBase


class MaximalWindow:
    """Draws, tests and replaces an engine's drafts by uniforms, and keeps what they were drawn from."""

    def __init__(self, engine: WindowBase) -> None:
        e = self.engine = engine
        self.recall = e.row_cache()
        #: Tests, fresh drafts, siblings drawn, siblings tested, draws: the bonus's is the last.
        most = e.longest_window
        self.columns = (most - 1, most - 1, e.siblings.total, e.siblings.widest, most)
        self.fresh_column = most - 1
        self.looked_up = 0 if self.recall is None else len(self.recall.slots)

    def _uniforms(self, back: int = 0) -> Tensor:
        """Return the uniforms ``[B, columns]`` of the step ``back`` before this one."""
        state = self.engine.state
        now = (state.step - back).clamp(max=self.engine.geometry.tokens - 1)
        here: Tensor = state.uniforms.index_select(1, now).squeeze(1)
        return here

    def fresh(self, newest: Tensor, back: int = 0) -> None:
        """Draw fresh drafts behind ``newest [B]``, by uniforms of the step ``back`` before this one."""
        e = self.engine
        state, fresh = e.state, e.fresh
        targets = fresh.targets(newest)
        rows = fresh.rows(self._given(*fresh.sources(newest)), targets)
        here = self._uniforms(back)[:, self.fresh_column :][:, : targets.shape[1]]
        drawn = e.filters.draws.draw(rows, here)
        state.tokens.scatter_(1, targets.clamp(max=e.geometry.tokens), drawn)
        if fresh.certain:
            rows = torch.zeros_like(rows).scatter(-1, drawn.unsqueeze(-1), 1.0)
        e.ring.write(state.q, targets, rows)

    def _given(self, left: Tensor, above: Tensor) -> Tensor | None:
        """Return what fresh drafts' sources say, ``[B, T, V]``; None where any code will do."""
        e = self.engine
        if e.fresh.certain and e.fresh.kind != "code":
            codes = e.state.tokens.gather(1, e.fresh.near(left, above)).unsqueeze(-1)
            nothing = torch.zeros(*left.shape, e.geometry.vocab, device=left.device)
            return nothing.scatter(-1, codes, 1.0)
        return e.rows_of(left, above)

    def propose(self, x: Tensor, chain: Tensor) -> tuple[Tensor, Tensor] | None:
        """Draw siblings of the drafts ``x [B, L - 1]``; return them and what they were drawn from."""
        e = self.engine
        if not e.siblings.total:
            return None
        first = sum(self.columns[:2])
        drawn = self._uniforms()[:, first : first + e.siblings.total]
        rows = e.sibling_rows(chain)
        deep = len(e.siblings.counts)
        return e.siblings.draft(x[:, :deep], rows, drawn, e.filters.draws), rows

    def decide(
        self, window: Tensor, chain: Tensor, logits: Tensor, others: tuple[Tensor, Tensor] | None
    ) -> Coupled:
        """Test the drafts, and keep the distributions of what is drafted for the next step."""
        e = self.engine
        state, length = e.state, e.window.length
        x, p = window[:, 1:], distribution(logits, e.filters)
        e.finite.note(p)
        if length == 1:  # there is nothing to test
            e.ring.write(state.q, chain + 1, p)
            return Coupled(e.filters.draws.draw(p, self._uniforms()[:, -1:]), e.ahead, None)
        q = e.ring.read(state.q, chain[:, 1:])
        rows = p[:, :length]
        places = state.length.unsqueeze(1) + e.ahead
        e.ring.write(state.q, places, rows)
        uniforms = self._uniforms()
        tests, draws = uniforms[:, : length - 1], uniforms[:, -length:]
        coupled = couple(
            x, rows, q, e.rule, tests, draws, anew=e.window.tail == "anew", ops=e.ops,
            siblings=others is not None, drawing=e.filters.draws,
        )  # fmt: skip
        if e.accounting == "exact" and e.rule.relaxed:
            price = window_prices(x, rows, q, e.rule, tests, coupled.count)
            coupled = replace(coupled, price=price)
        taken = None
        if others is not None:
            tried = self._try(x, coupled, *others, p[:, length:], uniforms)
            coupled = Coupled(tried.tokens, coupled.count, coupled.price)
            taken = tried.taken
        if self.recall is None:
            return coupled
        found = self.recall.refine(
            state, window, rows, q, coupled.tokens, coupled.count, tests, draws, taken
        )
        self.recall.write(state, places, window, state.row_probs, rows)
        e.ring.write(state.q, found.places, found.rows)
        return Coupled(found.tokens, coupled.count, coupled.price)

    def _try(
        self,
        x: Tensor,
        coupled: Coupled,
        others: Tensor,
        shares: Tensor,
        after: Tensor,
        uniforms: Tensor,
    ) -> Tried:
        """Try siblings of the first refused draft; keep what the token after one was drawn from."""
        e = self.engine
        assert coupled.left is not None
        first, deep = sum(self.columns[:3]), len(e.siblings.counts)
        refused = coupled.count - 1
        tried = e.siblings.attempt(
            others, x[:, :deep], shares, coupled.left, refused, coupled.tokens, after,
            uniforms[:, first : first + e.siblings.widest], uniforms[:, -e.window.length :],
            e.filters.draws,
        )  # fmt: skip
        place = torch.where(tried.taken, e.state.length + 2 + refused, e.geometry.tokens)
        e.ring.write(e.state.q, place.unsqueeze(1), tried.row.unsqueeze(1))
        return tried
