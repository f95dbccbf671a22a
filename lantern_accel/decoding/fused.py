"""Describes the parts of a step for its plan, and asks the device for a fused step."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lantern_accel.decoding.draft import Drafting
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import draft_stack_of, stack_of
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import (
    DrafterModel,
    DynamicTree,
    FusedStep,
    NoDrafts,
    Source,
    StaticTree,
    StepPlan,
    TargetModel,
    TreeBuffers,
)


def target_of(v: Verifying) -> TargetModel | None:
    """Describe the target of a step; None where it is more than a stack of plain blocks."""
    stack, guidance = stack_of(v.target), v.guidance
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
    stack = draft_stack_of(drafter)
    if stack is None:
        return None
    return DrafterModel(
        stack, drafting.cache, drafter.rope_cos, drafter.rope_sin, g.drafter_slots, g.scratch,
        drafter.config.mask_padding,
    )  # fmt: skip


def source_of(state: State, drafting: Drafting | None) -> Source:
    """Describe where a tree's drafts come from."""
    if drafting is None:
        return NoDrafts(state.root)
    buffers = TreeBuffers(
        state.root, state.pending_tokens, state.pending_count, state.pending_features,
        state.last_path, state.slot_of, state.place_of,
    )  # fmt: skip
    dynamic, tables = drafting.dynamic, drafting.tables
    if dynamic is not None:
        return DynamicTree(dynamic.top_k, dynamic.depth, dynamic.total, buffers)
    assert tables is not None
    return StaticTree(
        parents=tuple(tables.parents),
        depths=tuple(tables.depths),
        inner=tuple(tuple(level) for level in tables.inner),
        widths=tables.max_children,
        draft_columns=drafting.geometry.draft_columns,
        first_child=drafting.topology["first_child"],
        num_children=drafting.topology["num_children"],
        group=drafting.topology["group"],
        buffers=buffers,
    )


class FusedSteps:
    """What a device does of a plan at once: the whole step, or what follows a pass (:attr:`after`).

    A plan with a drafter is taken whole or not at all.
    """

    def __init__(self, ops: TensorOps, plan: StepPlan) -> None:
        trees = isinstance(plan.source, StaticTree | DynamicTree)
        complete = plan.target is not None and (plan.drafter is not None or not trees)
        self.plan = plan
        self.whole: FusedStep | None = ops.fused_step(plan) if complete else None
        self.after: FusedStep | None = None
        if not trees:
            self.after = ops.fused_step(replace(plan, target=None))

    def step(self) -> bool:
        """Do a step; return whether that was possible, else only caches may have changed."""
        return self.whole is not None and self.whole()

    def follow(self, logits: Tensor) -> bool:
        """Do what follows a pass with guided ``logits [B, T, V]``; return whether that was possible."""
        return self.after is not None and self.after(logits)
