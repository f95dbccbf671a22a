"""A stack of decoder blocks in one native call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lantern_accel.device.kv_cache import KVCache, Pass
from lantern_accel.device.plan import BlockWeights, Matrix, Norm
from lantern_accel.nn.transformer import RMSNorm, plan_blocks
from lantern_accel_cpu.native.kernels import (
    DTYPES,
    Kernels,
    cache_of,
    lies,
    mask_of,
    real,
    rotary_of,
    takes,
)
from lantern_accel_cpu.native.plans import Owner, Unserved, require
from lantern_accel_cpu.native.structures import Block as NativeBlock
from lantern_accel_cpu.native.structures import Trunk


@dataclass(frozen=True)
class PlannedCache(KVCache):
    """A cache, and the plans of the trunks that ran over it, by the identity of their blocks."""

    plans: dict[int, tuple[weakref.ref[nn.ModuleList], TrunkPlan | None]] = field(
        default_factory=dict, compare=False, repr=False
    )


class TrunkPlan:
    """What stays the same from one pass of some blocks over one cache to the next."""

    def __init__(self, blocks: Sequence[BlockWeights], kv: KVCache) -> None:
        self._owner = Owner()
        # Addresses only: a first pass does on tensors what every other one does.
        described = (NativeBlock * len(blocks))()
        for layer, (to, block) in enumerate(zip(described, blocks, strict=True)):
            norm = block.attention_norm
            hold = self._owner
            if norm is not None:
                to.attention_norm, to.attention_eps = hold(norm.weight), norm.eps
            to.ffn_norm, to.ffn_eps = hold(block.ffn_norm.weight), block.ffn_norm.eps
            for name, matrix in _matrices(block).items():
                hold.held.append(matrix.packed)
                setattr(to, name, address_of(matrix, kv.layout.dtype))
            to.k, to.v = hold(kv.keys[layer]), hold(kv.values[layer])
        first = blocks[0]
        self.given = Trunk(
            cache=cache_of(kv),
            blocks=described,
            layers=len(blocks),
            dim=first.w13.columns,
            hidden=first.w2.columns,
            dtype=DTYPES[kv.layout.dtype],
        )

    def last_norm(self, norm: Norm | None) -> None:
        """Let the trunk end with this norm, or with none."""
        if norm is None:
            self.given.norm = None
        elif self.given.norm != norm.weight.data_ptr():
            self.given.norm, self.given.norm_eps = self._owner(norm.weight), norm.eps


def address_of(matrix: Matrix, dtype: torch.dtype) -> int:
    """Return where a packed matrix lies, and how it is kept, as the kernels take it.

    Raises Unserved for one that they do not multiply activations of ``dtype`` by.
    """
    packed = matrix.packed
    if not takes(packed, dtype):
        raise Unserved(f"a weight was packed in a way that the kernels do not multiply {dtype} by")
    return packed.address


def _matrices(block: BlockWeights) -> dict[str, Matrix]:
    return {"wqkv": block.wqkv, "wo": block.wo, "w13": block.w13, "w2": block.w2}


def fits(blocks: Sequence[BlockWeights], kv: KVCache) -> bool:
    """Return whether the native trunk computes these blocks: LlamaGen's, packed, without biases."""
    layout = kv.layout
    if not blocks or len(blocks) > layout.layers or layout.dtype not in DTYPES:
        return False
    for block in blocks:
        norms = (block.attention_norm, block.ffn_norm)
        if any(norm is not None and norm.weight.dtype != layout.dtype for norm in norms):
            return False
        for matrix in _matrices(block).values():
            if matrix.bias is not None or not takes(matrix.packed, layout.dtype):
                return False
        if block.heads != layout.heads or block.wo.columns != layout.heads * layout.head_dim:
            return False
    return layout.head_dim % 2 == 0


def trunk_of(blocks: Sequence[BlockWeights], kv: KVCache, norm: Norm | None) -> TrunkPlan:
    """Return the plan of a step's blocks over its cache; raises Unserved if they have no native trunk."""
    here = lies(kv.layout.dtype, *kv.buffers) and kv.layout.head_major
    require(here, "the cache is not by head in one piece on the CPU")
    require(fits(blocks, kv), "the kernels do not know these blocks, or their weights' packing")
    plan = TrunkPlan(blocks, kv)
    plan.last_norm(norm)
    return plan


def _plan_trunk(blocks: nn.ModuleList, kv: PlannedCache) -> TrunkPlan | None:
    """Return the plan of these modules over a cache, made once; None where they have no native trunk."""
    found, key = kv.plans.get(id(blocks)), id(blocks)
    if found is None or found[0]() is not blocks:
        given = plan_blocks(blocks)
        plan = TrunkPlan(given, kv) if given is not None and fits(given, kv) else None
        found = kv.plans[key] = weakref.ref(blocks), plan
    return found[1]


def run(
    kernels: Kernels,
    blocks: nn.ModuleList,
    x: Tensor,
    at: Pass,
    taps: Sequence[int] = (),
    norm: nn.Module | None = None,
) -> Tensor | None:
    """Run all blocks on ``x [R, T, D]`` and the norm; None where the native trunk does not take them.

    Returns ``[R, T, (taps + 1) D]``: the states after the blocks ``taps``, then the last ones.
    """
    kv = at.cache
    if not isinstance(kv, PlannedCache) or at.mask is None or at.address is None or not real(x):
        return None
    if at.mask.dtype != torch.bool or x.dtype != kv.layout.dtype:
        return None
    plan = _plan_trunk(blocks, kv)
    if plan is None or not (norm is None or isinstance(norm, RMSNorm)):
        return None
    kernels.threads()
    plan.last_norm(None if norm is None else norm.to_plan())
    rows, count, dim = x.shape
    x, mask, address = x.contiguous(), at.mask.contiguous(), at.address
    given = plan.given
    given.rotary, held = rotary_of(at.cos, at.sin, rows, count)
    given.mask = mask_of(mask, rows)
    width = (len(taps) + 1) * dim
    out = x.new_empty((rows, count, width))
    given.x, given.out, given.slots = x.data_ptr(), out.data_ptr(), address.data_ptr()
    given.out_stride, given.tap_count = width, len(taps)
    tables = Owner(held)
    given.taps = tables.table(taps)
    kernels.library.trunk(byref(given))
    del tables
    return out
