"""Fused steps: what a plan's step is in native calls, or why it has something without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from functools import partial

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
from lantern_accel_cpu.native import races, trees
from lantern_accel_cpu.native.guesses import Guessing, guessing
from lantern_accel_cpu.native.kernels import Kernels, lies
from lantern_accel_cpu.native.plans import Owner, Unserved, check_model, check_plan, require
from lantern_accel_cpu.native.sampling import filter_of
from lantern_accel_cpu.native.structures import Advance, WindowPass
from lantern_accel_cpu.native.trunk import address_of, trunk_of

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
    return _advance_plainly(kernels, plan, source)


def _advance_plainly(kernels: Kernels, plan: StepPlan, source: NoDrafts) -> Callable[[int], None]:
    """Return what follows a pass of plain decoding under uniforms, on its logits' address."""
    at, state, owner = plan.sizes, plan.buffers, Owner()
    described = filter_of(plan.filter, owner)
    require(not plan.rule.relaxed, "the rule is relaxed")
    require(described is not None, "the filter's numbers are not float32 on the CPU")
    require(at.nodes == 1, "plain decoding has more than one position")
    assert state.uniforms is not None
    given = Advance(
        described, uniforms=owner(state.uniforms), tokens=owner(state.tokens),
        root=owner(source.root), images=at.images, vocab=at.vocab, image=at.tokens,
        columns=state.uniforms.shape[-1], histogram_stride=state.histogram.stride(0),
        **owner.progress(plan),
    )  # fmt: skip
    given.owner = owner
    return partial(kernels.library.advance, byref(given))


def window_pass(
    kernels: Kernels, plan: StepPlan, head: Guessing | None = None
) -> Callable[[], int]:
    """Return the pass of a plan's window; raises Unserved where the target has no kernel.

    ``head``: a draft head, for which the pass keeps its states.

    The function returns the address of guided logits float32 ``[B, T, V]``, overwritten by its next call.
    """
    at, target, buffers = plan.sizes, plan.target, plan.buffers
    assert target is not None
    stack, dtype = target.stack, target.cache.layout.dtype
    check_model(plan, dtype)
    require(not target.taps, "states of single blocks are wanted")
    trunk = trunk_of(stack.blocks, target.cache, stack.norm)
    owner = Owner(trunk, stack.head.packed)
    given = WindowPass(
        trunk.given, owner(stack.embedding), address_of(stack.head, dtype),
        owner(target.cos[at.prefix :]), owner(target.sin[at.prefix :]), owner(buffers.prefix_mask),
        owner(buffers.tokens), owner(buffers.length), owner.optional(target.scale),
        images=at.images, span=at.depth + 1, image=at.tokens, vocab=at.vocab, prefix=at.prefix,
        slots=at.slots, branches=at.branches, blind=at.images > 1,
        features=None if head is None else owner(head.features),
    )  # fmt: skip
    given.owner, library = owner, kernels.library
    address = owner(torch.empty(at.images, at.nodes, at.vocab))
    passed = partial(library.window_pass, byref(given), address)

    def run() -> int:
        kernels.threads()
        passed()
        return address

    return run
