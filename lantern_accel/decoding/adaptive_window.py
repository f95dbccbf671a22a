"""A window whose length changes from step to step: engines of several lengths on one state.

Where drafts are accepted a long window pays, where they are not plain decoding does, and what a step of
each costs is the device's. The host moves between them late, by the counters that it reads anyway; a step
itself is one of a few fixed ones, which a device captures each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.fused import FusedSteps
from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.length_policy import LengthPolicy
from lantern_accel.decoding.target import Target
from lantern_accel.decoding.window import WindowPass, WindowState
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import Sampling, Strategy, Window


class PlainStep:
    """A step that drafts nothing, on the state of a window: one token, drawn from the target."""

    def __init__(self, engine: JacobiEngine) -> None:
        self.engine = engine
        self.geometry = replace(engine.geometry, nodes=1, depth=0)
        self.forward = WindowPass(engine.verifying, self.geometry, ())
        self.passes: dict[int, WindowPass] = {}
        plan = engine.plan(self.geometry, engine.planned(), self.forward.reach)
        self.fused = FusedSteps(engine.ops, plan)

    def divide(self, sizes: Sequence[int]) -> None:
        """Take other buckets below the whole cache."""
        verifying = self.engine.verifying
        self.passes = {n: WindowPass(verifying, self.geometry, (), n) for n in sizes}

    @property
    def changes(self) -> dict[str, Tensor]:
        """The tensors that a step may change in place, by name."""
        return self.engine.changes

    def step(self, slots: int | None = None) -> None:
        """Decode one token per image. No value is read by the host.

        ``slots``: how many of the cache it looks at; None: all.
        """
        if slots is None and self.engine.fuses and self.fused.step():
            return
        forward = self.forward if slots is None else self.passes.get(slots, self.forward)
        engine, state, n = self.engine, self.engine.state, self.engine.geometry.tokens
        newest = state.length.unsqueeze(1)
        with engine.ops.phase("verify"):
            x = state.tokens.gather(1, newest)
            logits = forward.logits(state.length, state.start, state.prefix_mask, x)
        with engine.ops.phase("accept"):
            if self.fused.follow(logits):
                return
            token = engine.drafts.plain(logits, newest + 1)
        with engine.ops.phase("commit"):
            state.tokens.scatter_(1, (newest + 1).clamp(max=n), token.unsqueeze(1))
            open_ = state.length + 1 < n
            state.histogram.add_(engine.counts == open_.unsqueeze(1))
            state.steps.add_(open_)
            state.last_length.copy_(open_)  # no draft; -1 where no step was needed
            state.last_length.sub_(1)
            state.length.add_(open_)
            state.newest.copy_(torch.maximum(state.newest, state.length))
            state.step.add_(1)
            engine.finite.end()


class OnLongest(AdaptiveEngine):
    """Steps that check windows of several lengths, and plain ones, all on the buffers of the longest."""

    state: WindowState
    longest: Any
    plain: PlainStep | None

    def _of_lengths(
        self, strategy: Strategy, tokens: int, make: Callable[[int, Any], JacobiEngine]
    ) -> None:
        """Make the engines of the strategy's lengths that fit ``tokens``, the longest first.

        ``make`` gets a length and the longest engine, None for that one.
        """
        tree: Any = strategy.tree  # the shape that these engines were made for
        fitting = [one.length for one in tree.draft_lengths if one.length <= tokens]
        engines: dict[int, JacobiEngine] = {}
        longest: JacobiEngine | None = None
        for length in sorted((one for one in fitting if one > 1), reverse=True):
            engines[length] = make(length, longest)
            longest = longest or engines[length]
        assert longest is not None, "an image of one token is decoded plainly"
        self.longest = longest
        self.plain = PlainStep(longest) if 1 in fitting else None
        self._step_on(engines, strategy)

    @property
    def owners(self) -> dict[int, Any]:
        """What has the step of each length."""
        return super().owners | ({} if self.plain is None else {1: self.plain})

    def at_middle(self, length: int) -> None:
        middle = self.geometry.tokens // 2
        self.state.length.fill_(middle)  # what is known there does not change the time
        self.state.newest.fill_(middle)
        self.move(length)


class AdaptiveWindow(OnLongest):
    """Decodes ``batch`` images a call in windows of changing length, on static buffers.

    ``rule`` chooses lengths; None: by acceptance, among those whose costs are known, or all of them where
    none is. Raises as :class:`JacobiEngine` does.
    """

    engines: dict[int, JacobiEngine]

    def __init__(
        self,
        target: Target,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
        rule: LengthPolicy | None = None,
    ) -> None:
        window = strategy.tree
        assert isinstance(window, Window) and window.draft_lengths

        def make(length: int, longest: JacobiEngine | None) -> JacobiEngine:
            cut = window.model_copy(update={"length": length, "draft_lengths": ()})
            one = strategy.model_copy(update={"tree": cut})
            return JacobiEngine(
                target, ops, one, sampling, batch=batch, neighbours=neighbours, longest=longest
            )

        self.chosen = rule
        self._of_lengths(strategy, target.config.num_tokens, make)

    def host_functions(self) -> dict[str, Callable[[], None]]:
        """Return what a device captures beside prefill: a step of each length, and moving up to it."""
        shortest = min(self.lengths)
        widen = {f"widen {n}": e.widen for n, e in self.engines.items() if n > shortest}
        return super().host_functions() | widen

    def move(self, length: int) -> None:
        """Go on with another length; a longer one gets the fresh drafts that it needs."""
        if length > self.now:
            self.functions[f"widen {length}"]()
        self.now = length
