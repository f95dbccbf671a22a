"""Tree attention as a Triton kernel: few queries, an explicit mask, the cache read in parallel pieces.

A step has 1 to 64 queries a head and some thousand cached keys, so that one program a head would
leave most of the GPU idle. Every program takes a piece of one head's cache and keeps a running softmax;
blocks of the cache that no query sees (slots not filled yet, other branches of the tree) are never read.
The last program of a head joins the pieces, in one order. Partial sums are float32.

A program stays far under the 99 KB of shared memory that sm_86 and sm_89 have (57 KB at most).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel_cuda.kernels.counters import counters_of

#: Score of a hidden key: finite, so that a piece without a visible key makes no NaN.
HIDDEN = tl.constexpr(-1.0e30)
#: Programs a multiprocessor; two hide each other's loads.
PROGRAMS = 2


class Plan(NamedTuple):
    """Block sizes, warps and pieces of one call."""

    block_t: int
    block_l: int
    block_d: int
    warps: int
    splits: int
    blocks: int


def plan(nodes: int, capacity: int, width: int, groups: int, itemsize: int, cores: int) -> Plan:
    """Choose blocks and pieces for ``groups`` heads of all rows on ``cores`` multiprocessors.

    The blocks are those that compile for sm_86 without spilling registers; float32, which is there for
    exactness and not for speed, gets smaller ones.
    """
    block_d = max(triton.next_power_of_2(width), 16)
    if itemsize == 2:
        block_t = 16 if nodes <= 16 else 32 if nodes <= 32 else 64
        block_l, warps = 64, 8 if block_d > 64 and block_t > 16 else 4
    else:
        block_t = 16 if nodes <= 16 else 32
        block_l, warps = 16, 8
    whole = triton.cdiv(capacity, block_l)
    programs = groups * triton.cdiv(nodes, block_t)
    splits = max(min(triton.cdiv(PROGRAMS * cores, programs), whole), 1)
    blocks = triton.cdiv(whole, splits)
    return Plan(block_t, block_l, block_d, warps, triton.cdiv(whole, blocks), blocks)


#: Counts and strides of masks: no variant of their own for 1 or for multiples of 16.
_COUNTS = ["nodes", "heads", "splits", "blocks", "mask_row", "mask_node"]


@triton.jit(do_not_specialize=_COUNTS)
def _attend(
    q, cache_k, cache_v, mask, part, peak, total, lock, out,
    scale, nodes, capacity, reach, heads,
    q_row, q_node, q_head, mask_row, mask_node, splits, blocks,
    WIDTH: tl.constexpr, STORED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    split = tl.program_id(1)
    row = group // heads
    head = group % heads
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = (t < nodes)[:, None] & (d < WIDTH)[None, :]
    place = row * q_row + head * q_head + t[:, None] * q_node + d[None, :]
    query = tl.load(q + place, mask=inside, other=0.0)
    best = tl.full([BLOCK_T], HIDDEN, tl.float32)
    mass = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    first = group.to(tl.int64) * reach * STORED
    for block in range(blocks):
        slot = (split * blocks + block) * BLOCK_L + tl.arange(0, BLOCK_L)
        held = (slot < capacity)[:, None] & (d < WIDTH)[None, :]
        sees = tl.load(
            mask + row * mask_row + t[:, None] * mask_node + slot[None, :],
            mask=(t < nodes)[:, None] & (slot < capacity)[None, :],
            other=0,
        ).to(tl.int32)
        if tl.max(tl.max(sees, 1), 0) > 0:
            at = first + slot[:, None] * STORED + d[None, :]
            keys = tl.load(cache_k + at, mask=held, other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(sees > 0, scores, HIDDEN)
            now = tl.maximum(best, tl.max(scores, 1))
            weight = tl.where(sees > 0, tl.exp(scores - now[:, None]), 0.0)
            fade = tl.exp(best - now)
            values = tl.load(cache_v + at, mask=held, other=0.0)
            acc = acc * fade[:, None]
            acc += tl.dot(weight.to(values.dtype), values, input_precision="ieee")
            mass = mass * fade + tl.sum(weight, 1)
            best = now
    line = (group * splits + split) * nodes + t
    tl.store(part + line[:, None] * WIDTH + d[None, :], acc, mask=inside)
    tl.store(peak + line, best, mask=t < nodes)
    tl.store(total + line, mass, mask=t < nodes)
    tl.debug_barrier()
    mine = lock + group * tl.num_programs(2) + tl.program_id(2)
    if tl.atomic_add(mine, 1, sem="acq_rel") == splits - 1:
        tl.store(mine, 0)
        best = tl.full([BLOCK_T], HIDDEN, tl.float32)
        mass = tl.zeros([BLOCK_T], tl.float32)
        acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for one in range(splits):
            line = (group * splits + one) * nodes + t
            high = tl.load(peak + line, mask=t < nodes, other=HIDDEN, cache_modifier=".cg")
            share = tl.load(total + line, mask=t < nodes, other=0.0, cache_modifier=".cg")
            at = line[:, None] * WIDTH + d[None, :]
            piece = tl.load(part + at, mask=inside, other=0.0, cache_modifier=".cg")
            now = tl.maximum(best, high)
            fade, weight = tl.exp(best - now), tl.exp(high - now)
            acc = acc * fade[:, None] + piece * weight[:, None]
            mass = mass * fade + share * weight
            best = now
        acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        place = ((row * nodes + t[:, None]) * heads + head) * WIDTH + d[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


_LIBRARY = torch.library.Library("lantern_accel_cuda", "FRAGMENT")
_LIBRARY.define("tree_attention(Tensor q, Tensor k, Tensor v, Tensor mask, int cores) -> Tensor")


def _tree_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cores: int) -> Tensor:
    rows, nodes, heads, width = q.shape
    capacity, stored = k.shape[2:]
    chosen = plan(nodes, capacity, width, rows * heads, q.element_size(), cores)
    lines = (rows * heads, chosen.splits, nodes)
    part = torch.empty(*lines, width, dtype=torch.float32, device=q.device)
    peak = torch.empty(lines, dtype=torch.float32, device=q.device)
    total = torch.empty(lines, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        _attend[(rows * heads, chosen.splits, triton.cdiv(nodes, chosen.block_t))](
            q, k, v, mask, part, peak, total, counters_of(q.device, rows * heads * nodes), out,
            width**-0.5, nodes, capacity, k.stride(1) // stored, heads,
            q.stride(0), q.stride(1), q.stride(2), mask.stride(0), mask.stride(2), chosen.splits,
            chosen.blocks,
            WIDTH=width, STORED=stored,
            BLOCK_T=chosen.block_t, BLOCK_L=chosen.block_l, BLOCK_D=chosen.block_d,
            num_warps=chosen.warps, num_stages=1,
        )  # fmt: skip
    return out


_LIBRARY.impl("tree_attention", _tree_attention, "CompositeExplicitAutograd")
torch.library.register_fake("lantern_accel_cuda::tree_attention")(
    lambda q, k, v, mask, cores: q.new_empty(q.shape)
)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cores: int) -> Tensor:
    """Attend: ``q [R, T, H, d]``, ``k, v [R, H, L, >= d]``, ``mask`` int8 ``[R, 1, T, L]``.

    ``k, v`` are the first slots of a contiguous cache. Returns ``[R, T, H, d]``, contiguous, in q's
    dtype; ``cores`` is the GPU's count of multiprocessors. A query that sees nothing gives zeros.
    """
    found: Tensor = torch.ops.lantern_accel_cuda.tree_attention(q, k, v, mask, cores)
    return found
