"""Steps in kernels of its own: a whole one, or what follows a pass; None where a plan has no kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.device.kv_cache import Pass
from lantern_accel.device.plan import FusedStep, NoDrafts, StepPlan, TargetModel, Window
from lantern_accel.nn.rounding import Rounded

#: The version of plans that these steps were written for.
PLAN_VERSION = 3
#: What fresh drafts are taken from, of what the kernels know.
FRESH = ("above", "given")


def serves(plan: StepPlan) -> bool:
    """Return whether the kernels know a plan, with a target or without: plain steps, windows by keys."""
    s, b = plan.source, plan.buffers
    if plan.version != PLAN_VERSION or plan.greedy or b.keys is None:
        return False
    if plan.target is not None and not _knows(plan, plan.target):
        return False
    if plan.rule.relaxed or plan.rule.kind != "exact" or plan.rule.budget is not None:
        return False
    if isinstance(s, NoDrafts):
        return plan.sizes.nodes == 1
    from lantern_accel_cuda.kernels.advance import MOST_POSITIONS

    if not isinstance(s, Window) or plan.sizes.nodes > MOST_POSITIONS:
        return False
    plain = s.above is None and s.code_kind is None and s.head is None
    drafts = s.fresh in FRESH and (s.q is not None or s.fresh == "given")
    return plain and (drafts or plan.sizes.nodes == 1)


def _knows(plan: StepPlan, target: TargetModel) -> bool:
    """Return whether a pass of the target can be done from its plan."""
    layout, stack = target.cache.layout, target.stack
    blocks = stack.blocks
    matrices = [m for b in blocks for m in (b.wqkv, b.wo, b.w13, b.w2)] + [stack.head]
    # What no kernel of ours multiplies is the reference's, module by module.
    packed = not any(isinstance(one.packed, Rounded) for one in matrices)
    shared = not plan.sizes.own_prompts and all(b.heads == layout.heads for b in blocks)
    return packed and shared and layout.head_major and not target.taps


def fused_step(ops: Any, plan: StepPlan, cores: int = 1) -> FusedStep | None:
    """Return a plan's step, or what follows its pass (:meth:`.TensorOps.fused_step`).

    ``ops`` filters; for a plan with a target it is the backend, with the stages of :mod:`.layers`.
    ``cores``: the card's multiprocessors.
    """
    if not serves(plan):
        return None
    from lantern_accel_cuda.kernels.advance import Advance

    assert isinstance(plan.source, NoDrafts | Window)
    advance = Advance(plan.buffers, plan.source, plan.sizes.nodes, plan.sizes.tokens - 1)

    def after(logits: Tensor | None = None) -> bool:
        if logits is None or logits.dtype != plan.buffers.price.dtype:
            return False
        advance(ops.filter(logits, plan.filter))
        return True

    return after if plan.target is None else _whole(ops, plan, plan.target, after, cores)


def _whole(
    ops: Any, plan: StepPlan, target: TargetModel, after: FusedStep, cores: int
) -> FusedStep:
    """Return the whole step: what stands before the pass in one kernel, the blocks, what follows it."""
    from lantern_accel_cuda import layers
    from lantern_accel_cuda.kernels.enter import enter

    at, b, stack, layout = plan.sizes, plan.buffers, target.stack, target.cache.layout
    rotary, room = (target.cos, target.sin), at.slots - at.prefix - 1

    def step(logits: Tensor | None = None) -> bool:
        with ops.phase("verify"):
            begun = enter(
                b.tokens, b.length, b.prefix_mask, stack.embedding, rotary, at.nodes, at.branches,
                room, layout.capacity, layout.heads,
            )  # fmt: skip
            mask = begun.mask.expand(at.rows, -1, -1, -1)
            here = Pass(begun.cos, begun.sin, mask, target.cache, begun.address)
            x = layers.run_stack(ops, cores, stack, begun.x, here)
            given = ops.logits(x, stack.head.packed, stack.head.bias)
            found = ops.guide(
                given, begun.following, target.scale, target.image_scale, target.penalties
            )
        with ops.phase("accept"):
            return after(found)

    return step
