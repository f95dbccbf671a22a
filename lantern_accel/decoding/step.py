"""One step: draft, verify, judge, commit. No value is read by the host."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, Source
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.session import Session
from lantern_accel.decoding.target import Target
from lantern_accel.device.capture import own_step
from lantern_accel.device.plan import (
    Buffers,
    DrafterModel,
    FusedStep,
    StepPlan,
    StepSizes,
    TargetModel,
    list_buffers,
)
from lantern_accel.strategy.sources import DraftConfig


class Step:
    """A step of one length on a session's buffers, with the drafts of one source."""

    fused: FusedStep | None = None
    """What the device does of it at once: the whole step."""
    fused_end: FusedStep | None = None
    """The same of what follows a pass."""

    def __init__(
        self,
        session: Session,
        value: DraftConfig,
        made_by: type[Source],
        geometry: Geometry,
        copy: Target | None = None,
        longest: Source | None = None,
    ) -> None:
        """``copy``: the target with quantized weights, of a source that drafts with one.

        ``longest``: the drafts of the engine's longest step; None: these are.
        """
        self.session, self.ops, self.geometry = session, session.ops, geometry
        drafted, v = geometry.drafted, session.verifying
        self.drafter = session.drafter if drafted else None
        self.verifying = v if drafted or not v.taps else replace(v, taps=())
        cache = session.drafter_cache if drafted else None
        self.source = made_by(
            DraftContext(
                value, geometry, session, self.verifying, self.drafter, cache, copy, longest
            )
        )
        self._planned = self.verifying.guidance
        plan = self.plan()
        if plan is None:
            return
        # A plan with a drafter is taken whole or not at all.
        if plan.target is not None and (plan.drafter is not None or not drafted):
            self.fused = own_step(self.ops, plan)
        if not drafted:
            self.fused_end = own_step(self.ops, replace(plan, target=None))
        self.source.fuse(self.fused)

    def run(self, slots: int | None = None) -> None:
        """Run it. ``slots``: how many of the target's cache are looked at; None: all."""
        session, state, source = self.session, self.session.state, self.source
        source.prepare(state)
        # A plan keeps the guidance it was made with; tests plant faults in it.
        unseen, planned = session.observer is None, self.verifying.guidance is self._planned
        fused = self.fused if slots is None and unseen and planned else None
        if fused is not None and fused.run(None):
            return
        part = self.ops.region or (lambda run, *given: run(*given))
        with self.ops.phase("draft"):
            drafted = part(source.draft, state)
        with self.ops.phase("verify"):
            features, logits = source.verify(state, drafted, slots)
        part(self._end, drafted, features, logits)

    def _end(self, drafted: object, features: Tensor, logits: Tensor) -> None:
        """Judge what was drafted by the pass over it, and commit what is kept."""
        state, source, seen = self.session.state, self.source, self.session.observer
        with self.ops.phase("accept"):
            if seen is None and self.fused_end is not None and self.fused_end.run(logits):
                return
            judged = source.judge(state, drafted, logits)
            if seen is not None:
                judged = seen(self, drafted, features, logits, judged)
        with self.ops.phase("commit"):
            source.commit(state, drafted, features, judged)
            self.session.finite.end()

    def plan(self) -> StepPlan | None:
        """Describe the step for a device that does it at once; None where no plan can say."""
        g, session, state = self.geometry, self.session, self.session.state
        source = self.source.describe(state)
        if source is None:
            return None
        finite = session.finite
        # In plain decoding every token keeps its slot; the one more is for what is past the image.
        slots = g.target_slots if g.depth else g.prefix + g.tokens + 1
        sizes = StepSizes(
            g.batch, g.branches, g.prefix, g.tokens, g.nodes, g.depth, g.vocab, slots, g.own_prompts
        )
        held = state.buffers | finite.buffers | {"finite": finite.count}
        drawn = {"uniforms": not g.keyed, "keys": g.keyed and not session.greedy}
        read = {name: True for name, _ in list_buffers(Buffers)} | drawn | {"start": g.own_prompts}
        buffers = Buffers(**{name: one for name, one in held.items() if read.get(name)})
        found = StepPlan(
            sizes, source, session.filters.given, session.rule.given, session.greedy, buffers,
            *self._models(),
        )  # fmt: skip
        found.check(self.ops.index)
        return found

    def _models(self) -> tuple[TargetModel | None, DrafterModel | None]:
        """Describe target and drafter; None where one is more than a stack of plain blocks, or none."""
        v, guidance, g = self.verifying, self.verifying.guidance, self.geometry
        drafter, cache = self.drafter, self.session.drafter_cache
        stack, drafts = v.target.stack, None if drafter is None else drafter.stack
        target = drafted = None
        if stack is not None:
            allowed = guidance.allowed
            target = TargetModel(
                stack, v.cache, v.target.rope_cos, v.target.rope_sin, tuple(v.taps), guidance.scale,
                guidance.image_scale, None if allowed is None else (allowed.kind, allowed.penalty),
            )  # fmt: skip
        if drafter is not None and cache is not None and drafts is not None:
            drafted = DrafterModel(
                drafts, cache, drafter.rope_cos, drafter.rope_sin, g.drafter_slots, g.scratch,
                drafter.config.mask_padding,
            )  # fmt: skip
        return target, drafted
