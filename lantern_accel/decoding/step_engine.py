"""Makes an engine's buffers, and runs a step: draft, verify, accept, commit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lantern_accel.decoding.base import EngineBase, FusedSteps
from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.geometry import Geometry, cache_layouts, geometry_of
from lantern_accel.decoding.invariant import Choices
from lantern_accel.decoding.logits import Filters, distribution
from lantern_accel.decoding.rows import Cut, Guidance
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.sources.drafter import Drafting
from lantern_accel.decoding.state import FiniteGuard, RuntimeParams, State
from lantern_accel.decoding.target import Drafter, Target, place_of, undrawn_of
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import (
    Buffers,
    DrafterModel,
    DraftStack,
    Sizes,
    Source,
    Stack,
    StepPlan,
    TargetModel,
)
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import DraftSource
from lantern_accel.strategy.values import Sampling, Strategy


def target_of(v: Verifying) -> TargetModel | None:
    """Describe the target of a step; None where it is more than a stack of plain blocks."""
    stack: Stack | None = getattr(v.target, "stack", None)
    guidance = v.guidance
    if stack is None:
        return None
    allowed = guidance.allowed
    return TargetModel(
        stack, v.cache, v.target.rope_cos, v.target.rope_sin, tuple(v.taps), guidance.scale,
        guidance.image_scale, None if allowed is None else (allowed.kind, allowed.penalty),
    )  # fmt: skip


def drafter_of(drafting: Drafting) -> DrafterModel | None:
    """Describe a drafter; None where it is more than a stack of plain blocks."""
    drafter, g = drafting.drafter, drafting.geometry
    stack: DraftStack | None = getattr(drafter, "stack", None)
    if stack is None:
        return None
    return DrafterModel(
        stack, drafting.cache, drafter.rope_cos, drafter.rope_sin, g.drafter_slots, g.scratch,
        drafter.config.mask_padding,
    )  # fmt: skip


class StepEngine(EngineBase):
    """Decodes in steps of one form; a subclass says what a step drafts and how that is judged."""

    rewrites: ClassVar[bool] = False
    """Whether a step writes the target's cache more than once (:attr:`.KVLayout.rewritten`)."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
        copy: Target | None = None,
        lender: StepEngine | None = None,
        longest: Any = None,
    ) -> None:
        """Make the buffers; ``batch`` images are decoded together.

        ``drafter``, ``neighbours`` and ``copy``, the target with weights in fewer bits, are left alone by
        strategies that need none. ``lender``: another engine of the same images, whose cache this one
        reads and writes, and whose noise it reads, in place of its own. ``longest``: an engine of this
        class with more drafts, whose buffers this one steps on.

        Raises :class:`StrategyError` where the strategy needs a drafter, a neighbour table or a copy that
        is not there, and for more drafts in a row than the image has tokens.
        """
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        g = geometry_of(target, drafter, strategy, sampling, batch)
        drafter = drafter if g.drafted else None
        table = 4 * batch * g.tokens * g.vocab
        drawn = g.keyed and not sampling.greedy and lender is None
        g = replace(g, tabled=drawn and table <= ops.preferences.noise_bytes)
        self.geometry = self._sized(g, target, longest)
        if longest is None:
            self._own(target, drafter, neighbours, lender)
        else:
            self._step_on(longest)
        self._draft_with(drafter)
        self.divide(usual(self.geometry, self.verifying.cache.layout, ops))
        #: What the device does at once: a whole step, or what follows a pass.
        self.fused = FusedSteps(ops, self.plan())

    def _sized(self, g: Geometry, target: Target, longest: Any) -> Geometry:
        """Return the sizes of a step, of what all strategies have."""
        return g

    def _own(
        self,
        target: Target,
        drafter: Drafter | None,
        neighbours: Tensor | None,
        lender: StepEngine | None,
    ) -> None:
        """Make the buffers and settings that engines of fewer drafts may share."""
        g, ops, sampling = self.geometry, self.ops, self.sampling
        dtype, device = place_of(target)
        self.runtime_params = values = RuntimeParams(self.strategy, sampling, g.tokens, device)
        sums = ops.tables(g.vocab, device).sums
        undrawn, cut = undrawn_of(target), None
        if undrawn:  # then the filters come before the last that is masked, not after
            early = Filters(sampling, values.temperature, values.top_p, ops).given
            filters_none = sampling.greedy or (early.top_k == 0 and early.top_p is None)
            cut = Cut(g.vocab, None if filters_none else early, ops)
            sampling = sampling.model_copy(update={"top_k": 0, "top_p": 1.0})
        self.filters = Filters(sampling, values.temperature, values.top_p, ops, sums=sums)
        self.rule = self._rule(neighbours, device)
        image_scale = None if sampling.cfg_scale_image is None else values.image_scale
        scale = values.scale if sampling.guided else None
        guidance = Guidance(scale, image_scale, target.allowed(), ops, cut)
        layout, drafts = cache_layouts(g, target, drafter, ops)
        layout = replace(layout, rewritten=self.rewrites)
        self.state = State(g, target.condition_buffer(g.rows), dtype, ops.index, device)
        self.greedy = sampling.greedy
        noise = self.state.noise if g.tabled else None
        if lender is not None:
            noise = lender.choices.table
        self.choices = Choices(self.state.keys, self.filters, self.greedy, noise)
        # What the host reads while steps run: the lengths, and whether numbers are finite.
        self.finite = FiniteGuard(self.state.length, self.greedy)
        self._progress = ops.host_copy(self.finite.report)
        self.drafter_cache = None if drafts is None else ops.allocate(drafts)
        taps = () if drafter is None else drafter.taps
        open_pads = drafter is not None and not (drafter.config.mask_padding or g.own_prompts)
        cache = ops.allocate(layout) if lender is None else lender.verifying.cache
        self.verifying = Verifying(target, ops, cache, g, guidance, taps, open_pads)

    @abstractmethod
    def _draft_with(self, drafter: Drafter | None) -> None:
        """Make the drafts of the strategy's source."""

    def shorter(self, source: DraftSource) -> EngineBase:
        """Return an engine of fewer drafts, by a source of the same kind, on this one's buffers."""
        one = self.strategy.model_copy(update={"drafts": source})
        drafter = None if self.drafting is None else self.drafting.drafter
        target, batch = self.verifying.target, self.geometry.batch
        return type(self)(target, drafter, self.ops, one, self.sampling, batch=batch, longest=self)

    def prefill(self) -> None:
        """Run the prompt, draw the first token and get drafts ready. No value is read by the host."""
        self.choices.prepare()
        features, logits = self.verifying.prefill(self.state)
        self.begin(logits)
        self._first_drafts(features)

    def begin(self, logits: Tensor) -> None:
        """Draw the image's first token from guided ``logits [B, V]``, the prefill's, and keep it."""
        state, weights = self.state, logits if self.greedy else distribution(logits, self.filters)
        self.finite.begin(weights)
        if self.greedy:
            token = logits.argmax(dim=-1).to(self.ops.index)
        elif self.geometry.keyed:
            place = self.verifying.first.unsqueeze(1)
            token = self.choices.of(weights.unsqueeze(1), place).squeeze(1)
        else:
            token = self.filters.draws.draw(weights, state.uniforms[:, 0, -1])
        self._keep(token, weights)
        state.tokens[:, 0].copy_(token)
        state.step.fill_(1)

    def step(self, slots: int | None = None) -> None:
        """Run one step: draft, verify, accept, commit. No value is read by the host.

        ``slots``: one of :attr:`sizes`, as many of the target's cache are looked at; None: all.
        """
        if slots is None and self.fuses and self.fused.step():
            return
        with self.ops.phase("draft"):
            drafted = self._draft()
        with self.ops.phase("verify"):
            features, logits = self._verify(drafted, slots)
        with self.ops.phase("accept"):
            if self.fused.follow(logits):
                return
            accepted = self._accept(drafted, logits)
        with self.ops.phase("commit"):
            self._commit(drafted, features, accepted)
            self.finite.end()

    # The parts of prefill and of a step, in their order; what they hand on is the engine's own.

    @abstractmethod
    def _keep(self, token: Tensor, weights: Tensor) -> None:
        """Keep the first token ``[B]`` and what it was drawn from, ``[B, V]`` (greedily the logits)."""

    @abstractmethod
    def _first_drafts(self, features: Tensor) -> None:
        """Get ready for the first step; ``features [R, P, D]`` are the prompt's."""

    @abstractmethod
    def _draft(self) -> Any:
        """Propose what may follow the known tokens."""

    @abstractmethod
    def _verify(self, drafted: Any, slots: int | None) -> tuple[Tensor, Tensor]:
        """Run the target over drafts; return features ``[R, T, D]`` and guided logits [B, T, V]."""

    @abstractmethod
    def _accept(self, drafted: Any, logits: Tensor) -> Any:
        """Judge drafts by the logits of their places."""

    @abstractmethod
    def _commit(self, drafted: Any, features: Tensor, accepted: Any) -> None:
        """Write tokens and counters; complete images stay as they are."""

    @abstractmethod
    def planned(self) -> Source | None:
        """Describe where drafts come from, and their own buffers; None where no plan can say."""

    def plan(self) -> StepPlan | None:
        """Describe a step for a device that does it at once; None where no plan can say."""
        g, state, finite, drafting = self.geometry, self.state, self.finite, self.drafting
        #: Tests plant faults in what guides logits; a plan keeps what it was made with.
        self._planned = self.verifying.guidance
        source = self.planned()
        if source is None:
            return None
        # In plain decoding every token keeps its slot; the one more is for what is past the image.
        slots = g.target_slots if g.depth else g.prefix + g.tokens + 1
        sizes = Sizes(
            g.batch, g.branches, g.prefix, g.tokens, g.nodes, g.depth, g.vocab, slots, g.own_prompts
        )
        names = [
            "length",
            "tokens",
            "prefix_mask",
            "step",
            "steps",
            "histogram",
            "price",
            "last_length",
        ]
        buffers = Buffers(
            **{name: getattr(state, name) for name in names},
            finite=finite.count,
            holds=finite.holds,
            report=finite.report,
            start=state.start if g.own_prompts else None,
            uniforms=None if g.keyed else state.uniforms,
            keys=state.keys if g.keyed and not self.greedy else None,
        )
        found = StepPlan(
            sizes, source, self.filters.given, self.rule.given, self.greedy, buffers,
            target_of(self.verifying), None if drafting is None else drafter_of(drafting),
        )  # fmt: skip
        found.check(self.ops.index)
        return found

    @property
    def fuses(self) -> bool:
        """Whether a step may be a fused one: operators alone price exactly."""
        return self.accounting == "bound" and self.verifying.guidance is self._planned

    def _rule(self, neighbours: Tensor | None, device: torch.device) -> Rule:
        strategy = self.strategy
        if strategy.neighbours:
            if neighbours is None:
                raise StrategyError(f"the strategy {strategy.name!r} needs a neighbour table")
            if neighbours.shape[1] < strategy.neighbours:
                raise StrategyError(
                    f"the strategy {strategy.name!r} reads {strategy.neighbours} neighbours, the table "
                    f"has {neighbours.shape[1]}; make a wider one"
                )
            if neighbours.shape[1] > strategy.neighbours:
                neighbours = neighbours[:, : strategy.neighbours].clone()
            neighbours = neighbours.to(device)
        return Rule(
            strategy.acceptance,
            strategy.residual,
            neighbours if strategy.neighbours else None,
            self.runtime_params.rule,
            None if strategy.tv_budget is None else self.runtime_params.budget,
            torch.arange(strategy.acceptance.k, dtype=torch.int32, device=device),
        )
