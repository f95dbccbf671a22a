"""Describes the parts of a step for its plan, and asks the device for a fused step."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lantern_accel.decoding.sources.drafter import Drafting
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import (
    DrafterModel,
    DraftStack,
    DynamicTree,
    FusedStep,
    Stack,
    StaticTree,
    StepPlan,
    TargetModel,
)


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


class FusedSteps:
    """What a device does of a plan at once: the whole step, or what follows a pass (:attr:`after`).

    A plan with a drafter is taken whole or not at all. A source of drafts may have none.
    """

    def __init__(self, ops: TensorOps, plan: StepPlan | None) -> None:
        self.whole: FusedStep | None = None
        self.after: FusedStep | None = None
        if plan is None:
            return
        trees = isinstance(plan.source, StaticTree | DynamicTree)
        complete = plan.target is not None and (plan.drafter is not None or not trees)
        self.whole = ops.fused_step(plan) if complete else None
        if not trees:
            self.after = ops.fused_step(replace(plan, target=None))

    def step(self) -> bool:
        """Do a step; return whether that was possible, else only caches may have changed."""
        return self.whole is not None and self.whole()

    def follow(self, logits: Tensor) -> bool:
        """Do what follows a pass with guided ``logits [B, T, V]``; return whether that was possible."""
        return self.after is not None and self.after(logits)
