"""A stack of decoder blocks in one native call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.device.operations import KVCache
from lantern_accel.nn import transformer
from lantern_accel_cpu.native.kernels import (
    DTYPES,
    Kernels,
    cache_of,
    mask_of,
    real,
    rotary_of,
    takes,
)
from lantern_accel_cpu.native.library import Block, Trunk, byref


@dataclass(frozen=True)
class PlannedCache(KVCache):
    """A cache, and the plans of the trunks that ran over it, by the identity of their blocks."""

    plans: dict[int, Plan | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, kv: KVCache) -> PlannedCache:
        """Return a cache of the same tensors, without plans."""
        return cls(kv.layout, kv.keys, kv.values, kv.first)


class Plan:
    """What stays the same from one pass of some blocks over one cache to the next."""

    def __init__(self, blocks: nn.ModuleList, kv: KVCache) -> None:
        self.blocks = weakref.ref(blocks)
        self._held: list[Any] = []
        # Addresses only: a first pass does on tensors what every other one does.
        described = (Block * len(blocks))()
        modules: list[Any] = list(blocks)
        for layer, (to, block) in enumerate(zip(described, modules, strict=True)):
            norm = block.attention_norm
            if norm is not None:
                to.attention_norm, to.attention_eps = self._hold(norm.weight), norm.eps
            to.ffn_norm, to.ffn_eps = self._hold(block.ffn_norm.weight), block.ffn_norm.eps
            for name, projection in _projections(block).items():
                self._held.append(projection.packed)
                setattr(to, name, projection.packed.address)
            to.k, to.v = self._hold(kv.keys[layer]), self._hold(kv.values[layer])
        first = modules[0]
        self.given = Trunk(
            cache=cache_of(kv),
            blocks=described,
            layers=len(blocks),
            dim=first.feed_forward.w13.in_features,
            hidden=first.feed_forward.w2.in_features,
            dtype=DTYPES[kv.layout.dtype],
        )

    def _hold(self, tensor: Tensor) -> int:
        """Keep a tensor, and return its address."""
        self._held.append(tensor)
        return tensor.data_ptr()

    def last_norm(self, norm: transformer.RMSNorm | None) -> None:
        """Let the trunk end with this norm, or with none."""
        if norm is None:
            self.given.norm = None
        elif self.given.norm != norm.weight.data_ptr():
            self.given.norm, self.given.norm_eps = self._hold(norm.weight), norm.eps


def _projections(block: Any) -> dict[str, Any]:
    attention, feed = block.attention, block.feed_forward
    return {"wqkv": attention.wqkv, "wo": attention.wo, "w13": feed.w13, "w2": feed.w2}


def fits(blocks: nn.ModuleList, kv: KVCache) -> bool:
    """Return whether the native trunk computes these blocks: LlamaGen's, packed, without biases."""
    layout = kv.layout
    if not len(blocks) or len(blocks) > layout.layers or layout.dtype not in DTYPES:
        return False
    for block in blocks:
        if type(block) is not transformer.Block:
            return False
        norms = (block.attention_norm, block.ffn_norm)
        if any(norm is not None and norm.weight.dtype != layout.dtype for norm in norms):
            return False
        for projection in _projections(block).values():
            if projection.bias is not None or not takes(projection.packed, layout.dtype):
                return False
        wide = layout.heads * layout.head_dim
        if block.attention.heads != layout.heads or block.attention.wo.in_features != wide:
            return False
    return layout.head_dim % 2 == 0


def plan_of(blocks: nn.ModuleList, kv: PlannedCache) -> Plan | None:
    """Return the plan of these blocks over a cache, made once; None where they have no native trunk."""
    plans, key = kv.plans, id(blocks)
    plan = plans.get(key)
    if key not in plans or (plan is not None and plan.blocks() is not blocks):
        plan = plans[key] = Plan(blocks, kv) if fits(blocks, kv) else None
    return plan


def run(
    kernels: Kernels,
    blocks: nn.ModuleList,
    x: Tensor,
    at: transformer.Pass,
    taps: Sequence[int],
    norm: transformer.RMSNorm | None,
) -> Tensor | None:
    """Run all blocks on ``x [R, T, D]`` and the norm; None where the native trunk does not take them.

    Returns ``[R, T, (taps + 1) D]``: the states after the blocks ``taps``, then the last ones.
    """
    kv = at.cache
    if not isinstance(kv, PlannedCache) or at.mask is None or at.address is None or not real(x):
        return None
    if at.mask.dtype != torch.bool or x.dtype != kv.layout.dtype:
        return None
    plan = plan_of(blocks, kv)
    if plan is None:
        return None
    kernels.threads()
    plan.last_norm(norm)
    rows, count, dim = x.shape
    x, mask, address = x.contiguous(), at.mask.contiguous(), at.address
    given = plan.given
    given.rotary, held = rotary_of(at.cos, at.sin, rows, count)
    given.mask = mask_of(mask, rows)
    width = (len(taps) + 1) * dim
    out = x.new_empty((rows, count, width))
    given.x, given.out, given.slots = x.data_ptr(), out.data_ptr(), address.data_ptr()
    given.out_stride, given.tap_count = width, len(taps)
    given.taps = (c_int32 * max(1, len(taps)))(*taps)
    kernels.library.trunk(byref(given))
    del held
    return out
