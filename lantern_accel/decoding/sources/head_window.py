"""A window whose drafts the model's draft head guesses, where no pass of the target knows better.

Behind a refused draft every position was judged with the wrong token on its left. Where this pass or an
earlier one has seen the token that is there now, what it chose stays. Everywhere else the draft head
(:mod:`~lantern_accel.nn.draft_head`) guesses anew: from the last state that is exact, from the state that
the pass had at the position itself, and from the tokens around. Guesses race with the noise of their
position, as all drafts do. A draft may be any guess, so that nothing of this can change the picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.maximal_coupling import Coupled
from lantern_accel.decoding.sources.window import InvariantWindow
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.nn.draft_head import DraftHead, weights_of


class HeadWindow(InvariantWindow):
    """Drafts by a draft head and by earlier passes; judged as all drafts are where noise decides."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        target: Any = self.engine.verifying.target
        self.head: DraftHead = target.draft_head

    def _recalled(self, window: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
        """Leave earlier passes to :meth:`guess`, which looks them up draft by draft."""
        return tokens

    def begin(self, features: Tensor) -> None:
        """Take the state that the first token was drawn from, of the prompt's ``[R, P, D]``."""
        before = self.state.length - 1  # the first token's own number
        self.state.feature.copy_(self._guided(features[:, -1:], before)[:, 0])

    def draft(self, newest: Tensor, back: int = 0) -> None:
        """Guess the drafts of the next window behind ``newest [B]``, which no pass has seen."""
        state = self.state
        if self.engine.fused.guess():
            return
        nothing = state.feature.new_zeros(len(newest), 1, self.head.config.dim)
        known, seen = self.head.project(state.feature, nothing)
        none = torch.full_like(newest, self.head.config.vocab_size)
        for ahead in range(1, self.window.length):
            place = state.length + ahead
            guess = self._guess(ahead, known, seen[:, 0], place, none)
            self._put(place, torch.where(place > newest, guess, self._at(place)))

    def guess(self, window: Tensor, features: Tensor, coupled: Coupled, length: Tensor) -> None:
        """Draft behind what a pass made known: ``coupled``, whose tokens are in place already.

        ``window [B, L]``: what the pass saw, from ``length [B]`` on; ``features [R, L, D]``: its states.
        """
        state, index = self.state, self.ops.index
        size, none = self.window.length, self.head.config.vocab_size
        guided = self._guided(features[:, :size], length)
        count = coupled.count.expand_as(length)  # one number for all, where nothing was drafted
        last = (count - 1).view(-1, 1, 1).expand(-1, 1, guided.shape[-1])
        state.feature.copy_(guided.gather(1, last).squeeze(1))
        if size == 1:
            return
        known, seen = self.head.project(state.feature, guided)
        places = length.unsqueeze(1) + self.ahead
        for ahead in range(1, size):
            node = count + (ahead - 1)
            inside, at = node < size, node.clamp(max=size - 1).unsqueeze(1)
            place = length + count + ahead
            left, before = self._at(place - 1), self._at(place - 2)
            saw = torch.where(inside, window.gather(1, at).squeeze(1), none)
            chosen = coupled.tokens.gather(1, at).squeeze(1)
            own = seen.gather(1, at.unsqueeze(-1).expand(-1, 1, seen.shape[-1])).squeeze(1)
            own = torch.where(inside.unsqueeze(1), own, 0.0)
            guess = self._guess(ahead, known, own, place, saw)
            if ahead > self.head.config.depths:  # what a pass made of it is the better guess
                guess = torch.where(inside, chosen, guess)
            if self.recall is not None:
                entry, found = self.recall.find(
                    state, place.unsqueeze(1), left.unsqueeze(1), before.unsqueeze(1)
                )
                held = self.ops.held(state.row_tokens).flatten(1)
                guess = torch.where(found.squeeze(1), held.gather(1, entry).squeeze(1), guess)
            self._put(place, torch.where(saw == left, chosen, guess).to(index))
        if self.recall is not None:
            self.recall.write(state, places, window, coupled.tokens)

    def _guided(self, features: Tensor, length: Tensor) -> Tensor:
        """Return guided states float32 ``[B, L, D]`` of rows ``[R, L, D]``."""
        scale = self.engine.verifying.guidance.scale
        if scale is None:
            return features.float()
        following = length.unsqueeze(1) + self.ahead[: features.shape[1]]
        following = following.clamp(max=self.geometry.tokens - 1)
        return SamplingOps.guide(self.ops, features.float(), following, scale)

    def _guess(self, ahead: int, known: Tensor, seen: Tensor, place: Tensor, saw: Tensor) -> Tensor:
        """Return the head's guesses ``[B]`` for ``place [B]``, ``ahead`` of the last known token."""
        cell = place.clamp(max=self.geometry.tokens - 1)
        around = self.head.around(self.state.tokens, cell, saw)
        logits: Tensor = self.head(ahead, known, seen, around, cell)
        if self.greedy:
            return logits.argmax(dim=-1).to(self.ops.index)
        return self.choices.of(weights_of(logits).unsqueeze(1), cell.unsqueeze(1)).squeeze(1)

    def _at(self, place: Tensor) -> Tensor:
        """Return the tokens at ``place [B]``."""
        inside = place.clamp(min=0, max=self.geometry.tokens).unsqueeze(1)
        return self.state.tokens.gather(1, inside).squeeze(1)

    def _put(self, place: Tensor, tokens: Tensor) -> None:
        """Write ``tokens [B]`` at ``place [B]``; past the image lies what nobody reads."""
        inside = place.clamp(max=self.geometry.tokens).unsqueeze(1)
        self.state.tokens.scatter_(1, inside, tokens.unsqueeze(1))
