"""The target's pass over a window in one native call, from tokens to guided logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.device.plan import StepPlan
from lantern_accel_cpu.native.guesses import Guessing
from lantern_accel_cpu.native.kernels import Kernels, lies, takes
from lantern_accel_cpu.native.library import byref
from lantern_accel_cpu.native.structures import WindowPass
from lantern_accel_cpu.native.trunk import address_of, trunk_of


def window_pass(
    kernels: Kernels, plan: StepPlan, head: Guessing | None = None
) -> Callable[[], Tensor] | None:
    """Return the pass of a plan's window; None where the target has no kernel.

    ``head``: a draft head, for which the pass keeps its states.

    The function returns guided logits float32 ``[B, T, V]``, in memory that its next call overwrites.
    """
    at, target, buffers = plan.sizes, plan.target, plan.buffers
    if target is None or target.taps or at.own_prompts or at.branches > 2:
        return None
    if target.image_scale is not None or target.penalties is not None:
        return None
    stack, kv, scale = target.stack, target.cache, target.scale
    dtype = target.cache.layout.dtype
    if (scale is None) != (at.branches == 1) or not takes(stack.head.packed, dtype):
        return None
    floats = (target.cos, target.sin, *(() if scale is None else (scale,)))
    whole = (
        lies(dtype, stack.embedding, stack.norm.weight)
        and lies(torch.float32, *floats)
        and lies(torch.int64, buffers.tokens, buffers.length)
        and lies(torch.bool, buffers.prefix_mask)
    )
    trunk = trunk_of(stack.blocks, kv, stack.norm) if whole and stack.head.bias is None else None
    if trunk is None:
        return None
    cos, sin = (table[at.prefix :] for table in (target.cos, target.sin))
    given = WindowPass(
        trunk.given, stack.embedding.data_ptr(), address_of(stack.head), cos.data_ptr(), sin.data_ptr(),
        buffers.prefix_mask.data_ptr(), buffers.tokens.data_ptr(), buffers.length.data_ptr(),
        None if scale is None else scale.data_ptr(), images=at.images, span=at.depth + 1,
        image=at.tokens, vocab=at.vocab, prefix=at.prefix, slots=at.slots,
        branches=at.branches, blind=at.images > 1,
        features=None if head is None else head.features.data_ptr(),
    )  # fmt: skip
    out = torch.empty(at.images, at.nodes, at.vocab)
    library, keep = kernels.library, (plan, trunk, cos, sin, head)

    def run() -> Tensor:
        assert keep
        kernels.threads()
        library.window_pass(byref(given), out.data_ptr())
        return out

    return run
