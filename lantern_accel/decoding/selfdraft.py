"""Self-speculative decoding with quantised weights: the model's own weights in fewer bits draft.

A copy of the target that is read in half the time or less guesses the next tokens, and the target
checks all of them in one pass over a window, which writes over every key and value that the copy left in
its cache. The seed decides every token (:mod:`~.invariant`): the copy races with the same noise on its
own distribution, and a guess is kept where it is the target's token. So no distribution of the copy is
kept, any guess is a fair one, and at temperature 0 the tokens are plain decoding's too.

The copy guesses one token a pass, or in windows of its own (speculative Jacobi decoding of the copy) in
a fixed number of passes, whose drafts are the draft head's where the model has one. Source of the idea,
for language models: QuantSpec (arXiv 2502.10424), ML-SpecQD (2503.13565).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.sources.base import register
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import DraftSource
from lantern_accel.strategy.values import Sampling, SelfDrafts, Strategy, Window

#: Buffers of a request that the copy takes from the target's state in every step.
TAKEN = ("keys", "start", "prefix_mask")


def _checked(length: int) -> Window:
    """Return the window in which so many tokens, drafts and one, are checked; nothing is recalled."""
    window = Window(length=2, fresh="uniform", passes=0)
    return window.model_copy(update={"length": length})


@register(SelfDrafts)
class SelfEngine(JacobiEngine):
    """Decodes ``batch`` images a call: drafts by a copy of the target, then a check by the target.

    ``copy``: a target that shares all but its projections with ``target``
    (:func:`~lantern_accel.nn.transformer.rounded_copy`). It reads the target's keys and values, and
    its own of the drafts of one step.
    """

    copy: JacobiEngine
    """A step of it is one pass: a token, or a window."""
    positions: Tensor
    settles = False
    given = True
    rewrites = True  # by every pass of the copy, and by the check

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        copy: Target | None = None,
        longest: SelfEngine | None = None,
        **more: Any,
    ) -> None:
        drafts = strategy.drafts
        assert isinstance(drafts, SelfDrafts)
        if copy is None and longest is None:
            raise StrategyError(
                f"the strategy {strategy.name!r} drafts with a copy of the target, and none was given"
            )
        super().__init__(
            target, None, ops, strategy, sampling, batch=batch, longest=longest, **more
        )
        self.drafts_by, self.guesses = drafts, drafts.copy_passes
        if longest is not None:
            self.copy, self.positions = longest.copy, longest.positions
            return
        own = _checked(1)
        if drafts.window:
            guessed = getattr(target, "draft_head", None) is not None
            own = Window(length=drafts.window, fresh="head" if guessed else "above")
        one = strategy.model_copy(update={"drafts": own})
        assert copy is not None
        self.copy = JacobiEngine(copy, None, ops, one, sampling, batch=batch, lender=self)
        positions = torch.arange(
            self.geometry.tokens + 1, dtype=ops.index, device=self.state.length.device
        )
        self.positions = positions.unsqueeze(0).clone()  # no view, which some devices make anew

    @staticmethod
    def window_of(source: DraftSource) -> Window:
        return _checked(source.size[0])

    def shorter(self, source: DraftSource) -> EngineBase:
        if isinstance(source, SelfDrafts):
            return super().shorter(source)
        one = self.strategy.model_copy(update={"drafts": _checked(1)})
        ops, batch, target = self.ops, self.geometry.batch, self.verifying.target
        return JacobiEngine(target, None, ops, one, self.sampling, batch=batch, longest=self)

    def moves(self) -> dict[str, Callable[[], None]]:
        return {}  # the copy drafts anew

    def _apply(self, strategy: Strategy, sampling: Sampling) -> None:
        super()._apply(strategy, sampling)
        self.copy.runtime_params.set(strategy, sampling)

    def load(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        """Clear the buffers, the copy's too, and copy a request into them."""
        super().load(condition, prefix_mask, randomness)
        self.copy.load(condition, prefix_mask, randomness)

    @property
    def changes(self) -> dict[str, Tensor]:
        """Every tensor that prefill and steps change in place, by name; the caches are shared."""
        own = self.copy.changes.items()
        copied = {f"copy.{name}": t for name, t in own if not name.startswith("target.")}
        taken = {f"copy.state.{name}": getattr(self.copy.state, name) for name in TAKEN}
        return {**super().changes, **copied, **taken}

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers; the cache is counted once."""
        copied = (self.copy.state, self.copy.runtime_params, self.copy.finite)
        return super().nbytes + sum(one.nbytes for one in copied)

    def begin(self, logits: Tensor) -> None:
        super().begin(logits)
        # The same noise on the same logits: the same token, and what the copy's first drafts follow.
        self.copy.begin(logits)

    def _first_drafts(self, features: Tensor) -> None:
        if self.drafts_by.window:
            self.copy._first_drafts(features)

    def step(self, slots: int | None = None) -> None:
        """Draft by the copy, check by the target. No value is read by the host.

        ``slots``: how many of the cache the check looks at (:attr:`sizes`); None: all.
        """
        with self.ops.phase("draft"):
            self._guess()
        super().step(slots)

    def _guess(self) -> None:
        """Let the copy go on from what is known, and take what it has behind that."""
        state, own = self.state, self.copy.state
        # Rows of a server's batch change their image while others are under way.
        for name in TAKEN:
            getattr(own, name).copy_(getattr(state, name))
        known = self.positions <= state.length.unsqueeze(1)
        own.tokens.copy_(torch.where(known, state.tokens, own.tokens))
        own.length.copy_(self.ops.held(state.length))  # the copy's steps write theirs
        for _ in range(self.guesses):
            self.copy.step()
        state.tokens.copy_(torch.where(known, state.tokens, own.tokens))
