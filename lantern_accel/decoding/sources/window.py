"""Drafts in a window: the model's own earlier guesses, one row of them behind the last known token.

Two couplings judge them. Where the seed decides every token (:class:`InvariantWindow`), nothing is
tested and nothing is drawn from what is left, so that a draft needs no distribution: it is any guess,
kept where it is the token chosen. Behind a draft that is refused every position becomes what its row
chooses, and where an earlier pass had seen the token that is now on the left, what it chose there is the
better guess (SCD-GS, arXiv 2510.24211; the recall is this project's). Under the coupling ``maximal``
(:class:`MaximalWindow`) drafts are drawn, tested and replaced by uniforms, as SJD was published
(2410.01699; :mod:`~lantern_accel.decoding.maximal_coupling`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.draft_init import GIVEN, DraftInitializer
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.maximal_coupling import Coupled, couple, leading
from lantern_accel.decoding.row_cache import RowCache
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import Window


class Ring:
    """Finds the rows of :attr:`.State.q` that belong to positions; past the image is trash."""

    def __init__(self, g: Geometry, ahead: int, ops: TensorOps, device: torch.device) -> None:
        kept = max(g.kept, 1)
        place = torch.arange(g.tokens + ahead, dtype=ops.index, device=device) % kept
        place[g.tokens :] = kept
        self.place, self.ops = place, ops
        first = torch.arange(g.batch, dtype=ops.index, device=device)
        self.first = first.unsqueeze(1) * (kept + 1)

    def _rows(self, positions: Tensor) -> Tensor:
        place = self.place.index_select(0, positions.flatten()).view(positions.shape)
        return (place + self.first).flatten()

    def read(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return the distributions ``[B, T, V]`` of positions ``[B, T]``."""
        flat = q.flatten(0, 1).index_select(0, self._rows(positions))
        return flat.view(*positions.shape, -1)

    def write(self, q: Tensor, positions: Tensor, values: Tensor) -> None:
        """Store the distributions ``[B, T, V]`` of positions ``[B, T]``."""
        self.ops.put(q, 0, self._rows(positions), values.flatten(0, 1))


class WindowDrafts(ABC):
    """The drafts of one window: functions of static buffers, which a device captures with the step."""

    def __init__(
        self,
        engine: EngineBase,
        window: Window,
        ring: Ring,
        initial: DraftInitializer,
    ) -> None:
        """``engine`` chooses tokens from rows of logits, and its state has the drafts."""
        self.engine, self.window, self.ring, self.initial = engine, window, ring, initial
        self.geometry, self.state, self.ops = g, state, ops = (
            engine.geometry,
            engine.state,
            engine.ops,
        )
        self.greedy, self.choices, self.filters = engine.greedy, engine.choices, engine.filters
        self.finite = engine.finite
        length, device = window.length, state.length.device
        self.ahead = torch.arange(1, length + 1, dtype=ops.index, device=device)
        self.recall: RowCache | None = None
        """The rows of earlier passes; None where none are recalled."""
        if g.passes:
            self.recall = RowCache(g.passes, length, g.vocab, device, ops)

    @abstractmethod
    def draft(self, newest: Tensor, back: int = 0) -> None:
        """Draft what is behind ``newest [B]``, the last position that a pass has seen.

        ``back``: of this step's uniforms those of so many steps before.
        """

    @abstractmethod
    def decide(self, window: Tensor, chain: Tensor, logits: Tensor) -> Coupled:
        """Judge the drafts of ``window [B, L]``, at ``chain [B, L]``, by guided ``logits [B, L, V]``."""

    def _given(self, newest: Tensor) -> Tensor | None:
        """Return what fresh drafts follow, ``[B, T, V]``; None where any code will do."""
        fresh = self.initial
        return self.ring.read(self.state.q, fresh.sources(newest)) if fresh.reads else None


class InvariantWindow(WindowDrafts):
    """Chooses tokens by noise, or the likeliest, and drafts by the same noise."""

    def _choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of ``positions [B, T]``; keep their rows where fresh drafts follow them."""
        if self.greedy:
            self.finite.note(logits)
            return logits.argmax(dim=-1).to(self.ops.index)
        p = distribution(logits, self.filters)
        self.finite.note(p)
        if self.geometry.kept:
            self.ring.write(self.state.q, positions, p)
        return self.choices.of(p, positions)

    def draft(self, newest: Tensor, back: int = 0) -> None:
        state, fresh = self.state, self.initial
        if fresh.kind == GIVEN or (self.greedy and not fresh.reads):
            return
        targets = fresh.targets(newest)
        places = targets.clamp(max=self.geometry.tokens)
        if self.greedy:
            state.tokens.scatter_(1, places, state.tokens.gather(1, fresh.sources(newest)))
            return
        rows = fresh.rows(self._given(newest), targets)
        state.tokens.scatter_(1, places, self.choices.of(rows, targets))

    def decide(self, window: Tensor, chain: Tensor, logits: Tensor) -> Coupled:
        """Compare the drafts with the tokens that are chosen, which take their places."""
        state, length = self.state, self.window.length
        if length == 1:  # there is nothing to compare
            return Coupled(self._choose(logits, chain + 1), self.ahead)
        x = window[:, 1:]
        tokens = self._choose(logits, state.length.unsqueeze(1) + self.ahead)
        count = leading(x == tokens[:, :-1], x.dtype)
        if self.recall is not None:
            tokens = self._recalled(window, tokens, count + 1)
        return Coupled(tokens, count + 1)

    def _recalled(self, window: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
        """Take what earlier passes chose behind tokens that this one did not see; note what it chose.

        ``window [B, L]``: what the pass saw; ``tokens [B, L]``: what it chose; ``first [B]``: the first
        of these that is not known.
        """
        state = self.state
        assert self.recall is not None
        chosen = self.ops.held(state.row_tokens).flatten(1)
        behind = self.ahead > first.unsqueeze(1)
        left = torch.cat((window[:, :1], tokens[:, :-1]), dim=1)
        earlier = torch.cat((window[:, :1], left[:, :-1]), dim=1)
        places = state.length.unsqueeze(1) + self.ahead
        entry, found = self.recall.find(state, places, left, earlier)
        recalled = torch.where(behind & (left != window) & found, chosen.gather(1, entry), tokens)
        self.recall.write(state, places, window, tokens)
        return recalled


class MaximalWindow(WindowDrafts):
    """SJD: draws, tests and replaces drafts by uniforms, and keeps what they were drawn from."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        #: Uniforms: tests, fresh drafts, draws, of which the bonus's is the last.
        self.fresh_column = self.window.length - 1

    def draft(self, newest: Tensor, back: int = 0) -> None:
        """Draw fresh drafts behind ``newest [B]``, by uniforms of the step ``back`` before this one."""
        state = self.state
        targets = self.initial.targets(newest)
        rows = self.initial.rows(None, targets)
        here = state.drawn(back)[:, self.fresh_column :][:, : targets.shape[1]]
        drawn = self.filters.draws.draw(rows, here)
        state.tokens.scatter_(1, targets.clamp(max=self.geometry.tokens), drawn)
        self.ring.write(state.q, targets, rows)

    def decide(self, window: Tensor, chain: Tensor, logits: Tensor) -> Coupled:
        """Test the drafts, and keep the distributions of what is drafted for the next step."""
        state, length = self.state, self.window.length
        p = distribution(logits, self.filters)
        self.finite.note(p)
        q = self.ring.read(state.q, chain[:, 1:])
        self.ring.write(state.q, state.length.unsqueeze(1) + self.ahead, p)
        uniforms = state.drawn()
        tests, draws = uniforms[:, : length - 1], uniforms[:, -length:]
        return couple(window[:, 1:], p, q, tests, draws, drawing=self.filters.draws)
