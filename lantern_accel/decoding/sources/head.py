"""A window whose drafts the model's draft head guesses, where no pass of the target knows better.

Behind a rejected draft every position was judged with the wrong token on its left. Where this pass or an
earlier one has seen the token that is there now, what it chose stays. Everywhere else the draft head
(:mod:`~lantern_accel.nn.draft_head`) guesses again: from the last state that is exact, from the state
that the pass had at the position itself, and from the tokens around. Guesses race with the noise of
their position, as all drafts do. A draft may be any guess, so none of this changes the image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, Sizing, Source, register
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.maximal_coupling import Coupled
from lantern_accel.decoding.sources.window import InvariantWindow, MaximalWindow, WindowState
from lantern_accel.device import plan
from lantern_accel.errors import StrategyError
from lantern_accel.nn.draft_head import DraftHead, weights_of
from lantern_accel.strategy.sources import Window
from lantern_accel.strategy.strategy import Strategy


@register(Window)
class HeadWindow(InvariantWindow[Window]):
    """Drafts by a draft head and by earlier passes; judged as all drafts are where noise decides."""

    def __init__(self, given: DraftContext[Window]) -> None:
        super().__init__(given)
        target = given.verifying.target
        assert isinstance(target.draft_head, DraftHead)  # or no geometry would have been made
        row, tokens = target.config.row_tokens, self.geometry.tokens
        self.head: DraftHead = target.draft_head.fit(row, tokens)
        self.fused: Callable[[], bool] | None = None
        """The guesses that no pass has seen, as the device makes them at once."""

    @classmethod
    def select_class(cls, strategy: Strategy, greedy: bool) -> type[Source]:
        if getattr(strategy.drafts, "fresh", "") == "head":
            return cls
        return InvariantWindow if strategy.invariant or greedy else MaximalWindow

    @classmethod
    def add_sizes(cls, g: Geometry, value: Window, given: Sizing) -> Geometry:
        if given.target.draft_head is None:
            raise StrategyError(
                "this model has no draft head to guess a window's drafts; take another kind of fresh "
                "draft, such as window:16,above"
            )
        return replace(super().add_sizes(g, value, given), guesses=True)

    def fuse(self, step: plan.FusedStep | None) -> None:
        self.fused = None if step is None else step.guess

    def describe(self, state: WindowState) -> plan.WindowPlan:
        return replace(super().describe(state), head=self.head.to_plan(), feature=state.feature)

    def _recall(self, state: WindowState, window: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
        """Leave earlier passes to :meth:`after`, which looks them up draft by draft."""
        return tokens

    def begin(self, state: WindowState, features: Tensor, weights: Tensor) -> None:
        """Take the state that the first token was sampled from, and guess what follows it."""
        before = state.length - 1  # the first token's own number
        state.feature.copy_(self.guide_states(features[:, -1:], before)[:, 0])
        super().begin(state, features, weights)

    def renew(self, state: WindowState, newest: Tensor, back: int = 0) -> None:
        """Guess the drafts of the next window behind ``newest [B]``, which no pass has seen."""
        if self.fused is not None and self.fused():
            return
        nothing = state.feature.new_zeros(len(newest), 1, self.head.config.dim)
        known, seen = self.head.project(state.feature, nothing)
        none = torch.full_like(newest, self.head.config.vocab_size)
        for ahead in range(1, self.geometry.nodes):
            place = state.length + ahead
            guess = self._guess(state, ahead, known, seen[:, 0], place, none)
            self._put(state, place, torch.where(place > newest, guess, self._at(state, place)))

    def after(
        self, state: WindowState, window: Tensor, coupled: Coupled, features: Tensor, newest: Tensor
    ) -> None:
        """Draft behind what a pass made known, whose tokens are in place already."""
        index, length = self.ops.index, state.length
        size, none = self.geometry.nodes, self.head.config.vocab_size
        guided = self.guide_states(features[:, :size], length)
        count = coupled.count.expand_as(length)  # one number for all, where nothing was drafted
        last = (count - 1).view(-1, 1, 1).expand(-1, 1, guided.shape[-1])
        state.feature.copy_(guided.gather(1, last).squeeze(1))
        if size == 1:
            return
        known, seen = self.head.project(state.feature, guided)
        for ahead in range(1, size):
            node = count + (ahead - 1)
            inside, at = node < size, node.clamp(max=size - 1).unsqueeze(1)
            place = length + count + ahead
            left, before = self._at(state, place - 1), self._at(state, place - 2)
            saw = torch.where(inside, window.gather(1, at).squeeze(1), none)
            chosen = coupled.tokens.gather(1, at).squeeze(1)
            own = seen.gather(1, at.unsqueeze(-1).expand(-1, 1, seen.shape[-1])).squeeze(1)
            own = torch.where(inside.unsqueeze(1), own, 0.0)
            guess = self._guess(state, ahead, known, own, place, saw)
            if ahead > self.head.config.depths:  # what a pass made of it is the better guess
                guess = torch.where(inside, chosen, guess)
            if self.recall is not None:
                recalled, found = self.recall.find(
                    state, place.unsqueeze(1), left.unsqueeze(1), before.unsqueeze(1)
                )
                guess = torch.where(found.squeeze(1), recalled.squeeze(1), guess)
            self._put(state, place, torch.where(saw == left, chosen, guess).to(index))
        if self.recall is not None:
            self.recall.write(state, length.unsqueeze(1) + self.ahead, window, coupled.tokens)

    def _guess(
        self,
        state: WindowState,
        ahead: int,
        known: Tensor,
        seen: Tensor,
        place: Tensor,
        saw: Tensor,
    ) -> Tensor:
        """Return the head's guesses ``[B]`` for ``place [B]``, ``ahead`` of the last known token."""
        cell = place.clamp(max=self.geometry.tokens - 1)
        around = self.head.around(state.tokens, cell, saw)
        logits: Tensor = self.head(ahead, known, seen, around, cell)
        if self.greedy:
            return logits.argmax(dim=-1).to(self.ops.index)
        return self.choices.of(weights_of(logits).unsqueeze(1), cell.unsqueeze(1)).squeeze(1)

    def _at(self, state: WindowState, place: Tensor) -> Tensor:
        """Return the tokens at ``place [B]``."""
        return state.tokens.gather(1, place.clamp(0, self.geometry.tokens).unsqueeze(1)).squeeze(1)

    def _put(self, state: WindowState, place: Tensor, tokens: Tensor) -> None:
        """Write ``tokens [B]`` at ``place [B]``; past the image lies what nobody reads."""
        inside = place.clamp(max=self.geometry.tokens).unsqueeze(1)
        state.tokens.scatter_(1, inside, tokens.unsqueeze(1))
