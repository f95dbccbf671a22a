"""What follows a pass in kernels of its own, or None where a plan has something without one."""

from __future__ import annotations

from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import FusedStep, NoDrafts, StepPlan, Window

#: The version of plans that these steps were written for.
PLAN_VERSION = 3
#: What fresh drafts are taken from, of what the kernels know.
FRESH = ("above", "given")


def serves(plan: StepPlan) -> bool:
    """Return whether the kernels know what follows a plan's pass: plain steps, windows by keys."""
    s, b = plan.source, plan.buffers
    if plan.version != PLAN_VERSION or plan.target is not None or plan.greedy or b.keys is None:
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


def fused_step(ops: TensorOps, plan: StepPlan) -> FusedStep | None:
    """Return what follows a plan's pass (:meth:`.TensorOps.fused_step`); ``ops`` filters."""
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

    return after
