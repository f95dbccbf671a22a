"""The target's pass over a window in one native call, from tokens to guided logits."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from functools import partial

import torch

from lantern_accel.device.plan import StepPlan
from lantern_accel_cpu.native.guesses import Guessing
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.native.plans import Owner, check_model, require
from lantern_accel_cpu.native.structures import WindowPass
from lantern_accel_cpu.native.trunk import address_of, trunk_of


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
