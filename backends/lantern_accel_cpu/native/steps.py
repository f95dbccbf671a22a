"""Fused steps: what a plan's step is in native calls, or None where it has something without a kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import DynamicTree, FusedStep, NoDrafts, StaticTree, StepPlan, Window
from lantern_accel_cpu.native import races, trees, windows
from lantern_accel_cpu.native.guesses import Guessing, guessing
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.native.passes import window_pass

#: The version of plans that these steps were written for.
PLAN_VERSION = 3


def fused_step(kernels: Kernels, ops: TensorOps, plan: StepPlan) -> FusedStep | None:
    """Return a plan's step in native calls (:meth:`.TensorOps.fused_step`)."""
    if plan.version != PLAN_VERSION:
        return None
    if isinstance(plan.source, StaticTree | DynamicTree):
        return trees.tree_step(kernels, ops, plan, plan.source)
    head = guessing(kernels, plan)
    after = advance(kernels, plan, plan.source, head)
    if after is None or plan.target is None:
        return after
    whole_pass = window_pass(kernels, plan, head)
    if whole_pass is None:
        return None

    def run(logits: Tensor | None = None) -> bool:
        with ops.phase("verify"):
            logits = whole_pass()
        with ops.phase("accept"):
            return after(logits)

    return run


def advance(
    kernels: Kernels, plan: StepPlan, source: NoDrafts | Window, head: Guessing | None
) -> FusedStep | None:
    """Return what follows a pass in one call, on buffers that stay; None where the test has no kernel."""
    run: Callable[[Tensor], bool] | None
    if plan.buffers.uniforms is not None:
        run = windows.advance(kernels, plan, source) if isinstance(source, NoDrafts) else None
    else:
        run = races.advance(kernels, plan, source, head)
    if run is None:
        return None
    follow = run

    def after(logits: Tensor | None = None) -> bool:
        return logits is not None and follow(logits)

    return after
