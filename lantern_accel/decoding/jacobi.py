"""Decodes without a drafter: a window of drafts that the target improves step by step.

Speculative Jacobi decoding (SJD, arXiv 2410.01699; SCD, 2510.24211). A step is one pass over the
window: ``verify -> accept -> commit``, and fresh drafts at its end.

Everything lies at its position in the image: a token and, while it is a draft, the distribution that it
was drawn from; keys and values. So the window moves on by a larger ``length``, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.draft_init import GIVEN, DraftInitializer
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.maximal_coupling import Coupled
from lantern_accel.decoding.sources.base import register
from lantern_accel.decoding.sources.head_window import HeadWindow
from lantern_accel.decoding.sources.window import (
    InvariantWindow,
    MaximalWindow,
    Ring,
    WindowDrafts,
)
from lantern_accel.decoding.state import State
from lantern_accel.decoding.step_engine import StepEngine
from lantern_accel.decoding.target import Drafter, Target, above_of, place_of, row_of
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import flags
from lantern_accel.device.plan import Window as PlannedWindow
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import DraftSource
from lantern_accel.strategy.values import Window


class WindowPass:
    """The target's pass over a chain of ``length`` tokens.

    Node i of the chain is image token ``n + i``, with n the last known one, and writes its keys and
    values where they will stay. With ``slots`` a pass looks at that many of the cache, the first ones:
    the last of these is then the trash. A pass over more has an image position there, and writes it
    before any pass sees it.
    """

    def __init__(self, verifying: Verifying, geometry: Geometry, slots: int | None = None) -> None:
        self.verifying, self.geometry = verifying, geometry
        g, index = geometry, verifying.ops.index
        #: How many slots a pass looks at, and how many of them are the image's.
        self.reach = min(slots or g.target_slots, g.target_slots)
        self.room = self.reach - g.prefix - 1
        device = verifying.slots.device
        self.chain = torch.arange(g.depth + 1, dtype=index, device=device)

    def verify(self, state: State, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run the nodes ``tokens [B, T]``; return features ``[R, T, D]`` and guided logits [B, T, V]."""
        v, g, length = self.verifying, self.geometry, state.length
        place = length.unsqueeze(1) + self.chain
        cells = place.clamp(max=g.tokens - 1)
        following = (cells + 1).clamp(max=g.tokens - 1)
        trash = self.reach - 1
        slots = torch.where(place < self.room, g.prefix + place, trash)
        reach = (place + g.prefix).unsqueeze(-1)
        past = v.slots[g.prefix : g.prefix + self.room] <= reach
        nodes = place.shape[1]
        prompt = state.prefix_mask.unsqueeze(1).expand(-1, nodes, -1)
        rest = v.cache.layout.capacity - self.reach if self.reach == g.target_slots else 0
        hidden = flags(False, len(prompt), nodes, 1 + rest, device=prompt.device)
        visible = torch.cat((prompt, v.branches.masked(past), hidden), dim=-1)
        if v.ops.preferences.skips_finished_rows and g.batch > 1:
            visible &= v.branches.masked(length < g.tokens - 1).view(-1, 1, 1)
        return v.run(state, tokens, cells, following, slots, visible)


@dataclass(frozen=True)
class Drafted:
    """One step's window ``[B, L]`` at positions ``chain [B, L]``."""

    window: Tensor
    chain: Tensor


@register(Window)
class JacobiEngine(StepEngine):
    """Decodes in windows of drafts; one of a single token is plain decoding."""

    ring: Ring
    drafts: WindowDrafts
    """How drafts are made and judged."""
    settles = True
    given: bool = False
    """Whether another source writes all drafts before they are read."""

    @staticmethod
    def window_of(source: DraftSource) -> Window:
        """Return the window that a step of this source checks."""
        assert isinstance(source, Window)
        return source

    def _sized(self, g: Geometry, target: Target, longest: JacobiEngine | None) -> Geometry:
        config, ops = target.config, self.ops
        _, device = place_of(target)
        self.window = window = self.window_of(self.strategy.drafts)
        self.fresh = DraftInitializer(
            GIVEN if self.given else window.fresh,
            g.depth,
            g.tokens,
            row_of(config),
            g.vocab,
            target.allowed(),
            ops.index,
            device,
            above_of(config),
        )
        guesses = window.fresh == "head"
        if guesses:
            self._check_head(target)
        return replace(
            g,
            nodes=window.length,
            draft_columns=0 if g.keyed else 2 * g.depth,
            test_columns=0 if g.keyed else g.depth,
            in_place=True,
            kept=self._kept(g.keyed) if longest is None else longest.geometry.kept,
            passes=window.passes if g.keyed else 0,
            guesses=guesses,
        )

    def _check_head(self, target: Target) -> None:
        """Raise StrategyError where drafts cannot be a draft head's."""
        if getattr(target, "draft_head", None) is None:
            raise StrategyError(
                "this model has no draft head to guess a window's drafts; take another kind of fresh "
                "draft, such as window:16,above"
            )

    def _kept(self, keyed: bool) -> int:
        """Return how many positions' distributions are kept."""
        fresh, most, greedy = self.fresh, self.window.length, self.sampling.greedy
        reach = max(fresh.reach, 1)
        if keyed:
            return min(most + reach, fresh.tokens) if fresh.reads and not greedy else 0
        return 0 if greedy else min(2 * most + reach, fresh.tokens)

    def _own(self, target: Target, *given: Any) -> None:
        super()._own(target, *given)
        _, device = place_of(target)
        self.ring = Ring(self.geometry, 2 * self.window.length, self.ops, device)

    def _step_on(self, longest: EngineBase) -> None:
        super()._step_on(longest)
        assert isinstance(longest, JacobiEngine)
        self.ring = longest.ring

    def _draft_with(self, drafter: Drafter | None) -> None:
        g = self.geometry
        self.forward = WindowPass(self.verifying, g)
        kind = HeadWindow if g.guesses else InvariantWindow if g.keyed else MaximalWindow
        self.drafts = kind(self, self.window, self.ring, self.fresh)

    def planned(self) -> PlannedWindow:
        """Describe where drafts come from, and the buffers that are theirs."""
        g, state, fresh = self.geometry, self.state, self.fresh
        maximal = self.drafts if isinstance(self.drafts, MaximalWindow) else None
        noted = g.passes > 0
        return PlannedWindow(
            fresh=fresh.kind,
            width=fresh.width,
            passes=g.passes,
            kept=g.kept,
            fresh_column=0 if maximal is None else maximal.fresh_column,
            newest=state.newest,
            place=self.ring.place,
            q=state.q if g.kept else None,
            row_keys=state.row_keys if noted else None,
            row_previous=state.row_previous if noted else None,
            row_tokens=state.row_tokens if noted else None,
            above=fresh.up,
            code_kind=fresh.kinds,
            open_codes=fresh.open,
            head=self.drafts.head.given() if isinstance(self.drafts, HeadWindow) else None,
            feature=state.feature if g.guesses else None,
        )

    def moves(self) -> dict[str, Callable[[], None]]:
        return {"widen": self.widen} if self.geometry.depth else {}

    def widen(self) -> None:
        """Draw the fresh drafts that this window needs after steps of a shorter one."""
        self.drafts.draft(self.state.newest, back=1)

    def divide(self, sizes: Sequence[int]) -> None:
        super().divide(sizes)
        self.passes = {
            slots: WindowPass(self.verifying, self.geometry, slots) for slots in self.sizes[:-1]
        }

    def _keep(self, token: Tensor, weights: Tensor) -> None:
        if self.geometry.kept:
            place = self.verifying.first.unsqueeze(1)
            self.ring.write(self.state.q, place, weights.unsqueeze(1))

    def _first_drafts(self, features: Tensor) -> None:
        if isinstance(self.drafts, HeadWindow):
            self.drafts.begin(features)
        if self.geometry.depth:
            self.drafts.draft(self.state.length, back=1)

    def _draft(self) -> Drafted:
        state, g = self.state, self.geometry
        chain = state.length.unsqueeze(1)
        if g.depth:
            chain = chain + self.forward.chain
        x = state.tokens.gather(1, chain.clamp(max=g.tokens) if g.depth else chain)
        return Drafted(x, chain)

    def _verify(self, drafted: Drafted, slots: int | None) -> tuple[Tensor, Tensor]:
        forward = self.forward if slots is None else self.passes.get(slots, self.forward)
        return forward.verify(self.state, drafted.window)

    def _accept(self, drafted: Drafted, logits: Tensor) -> Coupled:
        return self.drafts.decide(drafted.window, drafted.chain, logits)

    def _commit(self, drafted: Drafted, features: Tensor, coupled: Coupled) -> None:
        """Write tokens and counters, and draw fresh drafts; complete images stay as they are."""
        state, g = self.state, self.geometry
        positions = state.length.unsqueeze(1) + self.drafts.ahead
        state.tokens.scatter_(1, positions.clamp(max=g.tokens), coupled.tokens)
        # A longer window may have seen more before this one.
        newest = torch.maximum(state.newest, positions[:, -1])
        state.newest.copy_(newest)
        if isinstance(self.drafts, HeadWindow):
            self.drafts.guess(drafted.window, features, coupled, state.length)
        elif g.depth:
            self.drafts.draft(newest)
        open_ = state.length < g.tokens - 1
        length = (state.length + coupled.count).clamp(max=g.tokens - 1)
        gained = length - state.length
        state.advance(length, gained, open_, gained - 1)
