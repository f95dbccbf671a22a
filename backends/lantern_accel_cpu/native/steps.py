"""Fused steps: what a plan's step is in native calls, or why it has something without a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.device.capture import Capture
from lantern_accel.device.plan import (
    DynamicTreePlan,
    FusedStep,
    NoDrafts,
    Refused,
    StaticTreePlan,
    StepPlan,
    WindowPlan,
)
from lantern_accel_cpu.native import plain, races, trees
from lantern_accel_cpu.native.guesses import Guessing, guessing
from lantern_accel_cpu.native.kernels import Kernels, lies
from lantern_accel_cpu.native.passes import window_pass
from lantern_accel_cpu.native.plans import Unserved, check_plan

#: The version of plans that these steps were written for.
PLAN_VERSION = 3


def fused_step(kernels: Kernels, ops: Capture, plan: StepPlan) -> FusedStep | Refused:
    """Return a plan's step in native calls (:meth:`.Capture.fused_step`)."""
    try:
        check_plan(plan, PLAN_VERSION)
        if isinstance(plan.source, StaticTreePlan | DynamicTreePlan):
            return FusedStep(trees.tree_step(kernels, ops, plan, plan.source))
        return _without_tree(kernels, ops, plan, plan.source)
    except Unserved as error:
        return Refused(str(error))


def _without_tree(
    kernels: Kernels, ops: Capture, plan: StepPlan, source: NoDrafts | WindowPlan
) -> FusedStep:
    head = guessing(kernels, plan)
    after = _advance(kernels, plan, source, head)
    if plan.target is None:

        def end(logits: Tensor | None) -> bool:
            if logits is None or not lies(torch.float32, logits := logits.contiguous()):
                return False
            kernels.threads()
            after(logits.data_ptr())
            return True

        return FusedStep(end)
    whole_pass = window_pass(kernels, plan, head)

    def run(logits: Tensor | None) -> bool:
        with ops.phase("verify"):
            address = whole_pass()
        with ops.phase("accept"):
            after(address)
        return True

    guess = None if head is None else races.fresh_guesses(kernels, plan, source, head)
    return FusedStep(run, guess)


def _advance(
    kernels: Kernels, plan: StepPlan, source: NoDrafts | WindowPlan, head: Guessing | None
) -> Callable[[int], None]:
    """Return what follows a pass in one call on its logits' address, on buffers that stay."""
    if plan.buffers.uniforms is None:
        return races.advance(kernels, plan, source, head)
    if isinstance(source, WindowPlan):
        raise Unserved("uniforms decide about a window")
    return plain.advance(kernels, plan, source)
