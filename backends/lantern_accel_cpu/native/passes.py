"""The target's pass over a window in one native call, from tokens to guided logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lantern_accel_cpu.native.kernels import Kernels, lies, takes
from lantern_accel_cpu.native.library import WindowPass, byref
from lantern_accel_cpu.native.trunk import PlannedCache, plan_of


def window_pass(
    kernels: Kernels, ops: Any, verifying: Any, state: Any, span: int, slots: int
) -> Callable[[], Tensor | None] | None:
    """Return a pass over a window in one call (:meth:`TensorOps.window_pass`), on buffers that stay."""
    v, g = verifying, verifying.geometry
    target, guidance, kv = v.target, v.guidance, v.cache
    stack = getattr(target, "stack", None)
    if stack is None or target.ops is not ops or not isinstance(kv, PlannedCache):
        return None
    if v.taps or g.own_prompts or g.branches > 2:
        return None
    if guidance.image_scale is not None or guidance.allowed is not None:
        return None
    head, dtype, scale = stack.head, kv.layout.dtype, guidance.scale
    if (scale is None) != (g.branches == 1) or not takes(head.packed, dtype):
        return None
    floats = (target.rope_cos, target.rope_sin, *(() if scale is None else (scale,)))
    whole = (
        lies(dtype, stack.embedding, stack.norm.weight)
        and lies(torch.float32, *floats)
        and lies(torch.int64, state.tokens, state.length)
        and lies(torch.bool, state.prefix_mask)
    )
    if not whole or head.bias is not None:
        return None
    plan = plan_of(stack.blocks, kv)
    if plan is None:
        return None
    plan.last_norm(stack.norm)
    cos, sin = (table[g.prefix :] for table in (target.rope_cos, target.rope_sin))
    given = WindowPass(
        plan.given, stack.embedding.data_ptr(), head.packed.address, cos.data_ptr(), sin.data_ptr(),
        state.prefix_mask.data_ptr(), state.tokens.data_ptr(), state.length.data_ptr(),
        None if scale is None else scale.data_ptr(), images=g.batch, span=span,
        image=g.tokens, vocab=g.vocab, prefix=g.prefix, slots=slots,
        branches=g.branches, blind=ops.skips_blind and g.batch > 1,
    )  # fmt: skip
    out = torch.empty(g.batch, span, g.vocab)
    given.trunk.tap_count = 0
    library, keep = kernels.library, (stack, head.packed, cos, sin, state, scale, plan, kv)

    def run() -> Tensor | None:
        if v.guidance is not guidance:
            return None
        assert keep
        kernels.threads()
        library.window_pass(byref(given), out.data_ptr())
        return out

    return run
