"""Quantized self-drafts: speculative decoding by the model's own quantized weights.

A copy of the target guesses the next tokens by the noise that decides the target's own
(:mod:`~.accept`), and the target checks all of them in one pass over a window, which writes over
every key and value that the copy left in its cache. The copy guesses one token a pass, or in windows of
its own. For language models: QuantSpec (arXiv 2502.10424), ML-SpecQD (2503.13565).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lantern_accel.decoding.draft_init import GIVEN
from lantern_accel.decoding.drafts import DraftContext, Sizing, register
from lantern_accel.decoding.geometry import Geometry, geometry_of
from lantern_accel.decoding.session import Session
from lantern_accel.decoding.sources.head import HeadWindow
from lantern_accel.decoding.sources.window import InvariantWindow, WindowState
from lantern_accel.decoding.step import Step
from lantern_accel.decoding.target import Target
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import DraftConfig, Fresh, SelfDrafts, Window

#: Buffers of a request that the copy's session reads too.
SHARED_BUFFERS = ("prefix_mask", "keys", "start")


def one_token() -> Window:
    """Return the window of plain decoding: its one token is the last known."""
    return Window(length=2, fresh="uniform", passes=0).model_copy(update={"length": 1})


def _on(session: Session, copy: Target, geometry: Geometry) -> Session:
    """Return a session of the same request on a copy's weights.

    It has a state of its own, and reads and writes the target's cache.
    """
    made: Session = object.__new__(Session)
    vars(made).update(vars(session))
    dtype, device = copy.weight.dtype, copy.weight.device
    nothing = torch.zeros(0, dtype=dtype, device=device)
    made.geometry, made.drafter, made.drafter_cache = geometry, None, None
    made.state = WindowState(geometry, nothing, dtype, session.ops.index, device)
    for name in SHARED_BUFFERS:
        setattr(made.state, name, getattr(session.state, name))
    made.watch()
    made.verifying = replace(session.verifying, target=copy, geometry=geometry, taps=())
    return made


@register(SelfDrafts)
class CopyDrafts(InvariantWindow[SelfDrafts]):
    """Drafts by a copy of the target, which shares all but its projections with it."""

    settles = False
    rewrites = True  # by every pass of the copy, and by the check
    copy: Step
    positions: Tensor

    def __init__(self, given: DraftContext[SelfDrafts]) -> None:
        super().__init__(given)
        self.passes, one = given.config.copy_passes, given.longest
        if isinstance(one, CopyDrafts):
            self.copy, self.positions = one.copy, one.positions
            return
        index, device = self.ops.index, given.session.state.length.device
        #: A step of the copy is one pass: a token, or a window.
        self.copy = self._step(given)
        positions = torch.arange(self.geometry.tokens + 1, dtype=index, device=device)
        # No view, which some devices make again.
        self.positions = positions.unsqueeze(0).clone()

    @classmethod
    def window_of(cls, value: SelfDrafts) -> tuple[Fresh | Literal["given"], int]:
        return GIVEN, 0

    @classmethod
    def shorter(cls, value: SelfDrafts, length: int) -> DraftConfig:
        return value.of_length(length) if length > 1 else one_token()

    def _step(self, given: DraftContext[SelfDrafts]) -> Step:
        """Make the copy's step, on a session of its own."""
        session, copy, window = given.session, given.copy, given.config.window
        strategy, sampling = session.strategy, session.sampling
        if copy is None:
            raise StrategyError(
                f"the strategy {strategy.name!r} drafts with a copy of the target, and none was given"
            )
        own = one_token()
        if window:
            guessed = session.verifying.target.draft_head is not None
            own = Window(length=window, fresh="head" if guessed else "above")
        one = strategy.model_copy(update={"drafts": own})
        made_by = HeadWindow.select_class(one, session.greedy)
        g = geometry_of(copy, None, one, sampling, self.geometry.batch)
        g = made_by.add_sizes(g, own, Sizing(copy, session.greedy))
        return Step(_on(session, copy, g), own, made_by, g)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The state of the copy that is its own."""
        own = self.copy.session
        mine = {n: t for n, t in own.state.buffers.items() if n not in SHARED_BUFFERS and t.numel()}
        state = {f"state.{name}": one for name, one in mine.items()}
        return state | {f"finite.{name}": t for name, t in own.finite.buffers.items()}

    def begin(self, state: WindowState, features: Tensor, weights: Tensor) -> None:
        """Let the copy know the first token, which the same noise would draw from the same logits."""
        super().begin(state, features, weights)
        for one in self.buffers.values():
            one.zero_()
        own = self.copy.session
        own.finite.begin(weights)
        own.state.begin(state.tokens[:, 0])
        self.copy.source.begin(own.state, features, weights)

    def prepare(self, state: WindowState) -> None:
        """Let the copy go on from what is known, and take what it has behind that."""
        with self.ops.phase("draft"):
            own = self.copy.session.state
            known = self.positions <= state.length.unsqueeze(1)
            own.tokens.copy_(torch.where(known, state.tokens, own.tokens))
            own.length.copy_(self.ops.snapshot(state.length))  # the copy's steps write theirs
            for _ in range(self.passes):
                self.copy.run()
            state.tokens.copy_(torch.where(known, state.tokens, own.tokens))
