"""Tree attention as a Triton kernel: few queries, an explicit mask, the cache read in parallel pieces.

A step has 1 to 64 queries a head and some thousand cached keys, so that one program a head would leave
most of the GPU idle. Blocks of a head's cache go round among its programs, each of which keeps a running
softmax. So all programs work at any length, and which of them adds a block depends neither on the length
nor on the number of queries. A program first looks in the mask for its last block that a query sees; it
reads nothing behind that, and up to there keys and values are on their way a block ahead. The last
program of a head joins what all have, in one order. Partial sums are float32.

A program stays far under the 99 KB of shared memory that sm_86 and sm_89 have (60 KB at most).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lantern_accel_cuda.kernels.counters import counters_of
from lantern_accel_cuda.kernels.operators import operator

#: The peak of no score: finite, so that a piece without a visible key makes no NaN.
HIDDEN = tl.constexpr(-1.0e30)
#: Programs a multiprocessor; two hide each other's loads.
PROGRAMS = 2
#: Blocks that are on their way or worked at.
STAGES = 2


class Plan(NamedTuple):
    """Block sizes and warps of one call, and the programs of a head."""

    block_t: int
    block_l: int
    block_d: int
    warps: int
    splits: int


def plan(nodes: int, capacity: int, width: int, groups: int, itemsize: int, cores: int) -> Plan:
    """Choose blocks and programs for ``groups`` heads of all rows on ``cores`` multiprocessors.

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
    return Plan(block_t, block_l, block_d, warps, splits)


#: Counts: no variant of their own for 1 or for multiples of 16.
_COUNTS = ["nodes", "heads", "splits"]


@triton.jit(do_not_specialize=_COUNTS)
def _attend(
    q, cache_k, cache_v, mask, part, peak, total, lock, out,
    scale, nodes, capacity, reach, heads,
    q_row, q_node, q_head, mask_row, mask_node, splits,
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
    bytes = mask + row * mask_row + t[:, None] * mask_node
    # Four bytes at once, of four blocks: one wait tells how far the queries see.
    word = tl.arange(0, BLOCK_L)
    words = (mask + row * mask_row).to(tl.pointer_type(tl.int32)) + t[:, None] * (mask_node // 4)
    ends = tl.zeros([BLOCK_T, BLOCK_L], tl.int32)
    for block in range(split, (capacity + BLOCK_L - 1) // BLOCK_L, 4 * splits):
        own = block + word // (BLOCK_L // 4) * splits
        at = own * (BLOCK_L // 4) + word % (BLOCK_L // 4)
        there = (t < nodes)[:, None] & (at < (capacity + 3) // 4)[None, :]
        seen = tl.load(words + at[None, :], mask=there, other=0) != 0
        ends = tl.where(seen, own[None, :] + 1, ends)
    blocks = tl.max(tl.max(ends, 1), 0)
    best = tl.full([BLOCK_T], HIDDEN, tl.float32)
    mass = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    first = group.to(tl.int64) * reach * STORED
    for block in range(split, blocks, splits):
        slot = block * BLOCK_L + tl.arange(0, BLOCK_L)
        held = (slot < capacity)[:, None] & (d < WIDTH)[None, :]
        at = first + slot[:, None] * STORED + d[None, :]
        keys = tl.load(cache_k + at, mask=held, other=0.0)
        values = tl.load(cache_v + at, mask=held, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        there = (t < nodes)[:, None] & (slot < capacity)[None, :]
        sees = tl.load(bytes + slot[None, :], mask=there, other=0)
        # Below all peaks, so that the weight of what is hidden is 0.
        scores = tl.where(sees > 0, scores, 2 * HIDDEN)
        now = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp(scores - now[:, None])
        fade = tl.exp(best - now)
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
        for one in tl.range(0, splits, loop_unroll_factor=2):  # two are read at once
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


@operator(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor mask, int cores) -> Tensor",
    lambda q, *rest: q.new_empty(q.shape),
)
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cores: int) -> Tensor:
    """Attend: ``q [R, T, H, d]``, ``k, v [R, H, L, >= d]``, ``mask`` int8 ``[R, 1, T, L]``.

    ``k, v`` are the first slots of a contiguous cache. Returns ``[R, T, H, d]``, contiguous, in q's
    dtype; ``cores`` is the GPU's count of multiprocessors. A query that sees nothing gives zeros.
    """
    rows, nodes, heads, width = q.shape
    capacity, stored = k.shape[2:]
    edges = mask.shape[-1], mask.storage_offset(), mask.stride(0), mask.stride(2)
    if any(n % 16 for n in edges):  # not of a cache as it is laid out here
        mask = F.pad(mask, (0, -mask.shape[-1] % 16))
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
            WIDTH=width, STORED=stored,
            BLOCK_T=chosen.block_t, BLOCK_L=chosen.block_l, BLOCK_D=chosen.block_d,
            num_warps=chosen.warps, num_stages=STAGES,
        )  # fmt: skip
    return out
