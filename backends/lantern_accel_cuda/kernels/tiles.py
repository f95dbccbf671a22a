"""Multiplies tens of rows by quantized weights on tensor cores, all rows of a tile at once.

Where :mod:`.rounded` has a block of rows, a program has a tile of outputs: codes become numbers in
registers and are the product's first operand, which a tensor core takes from there, and up to 128 rows
are the second. So every code is read and turned into a number once, whatever the number of rows. Codes,
planes, steps and offsets are those of :class:`.rounded.Columns`, and so is the arithmetic: codes are
multiplied as they are, and a group's step and offset are applied to its sums.

Where a matrix has too few tiles to fill the card, its inputs are shared among programs; the last of a
tile adds what all have found, in one order. Neither that nor the order of inputs depends on the number
of rows: a row gives the same bits among 17 rows and among 128. It gives others than in :mod:`.rounded`'s
kernel, whose sums the cards' instructions round in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel_cuda.kernels.counters import counters_of

#: Dtypes of activations, and outputs of a program. On sm_90 a tensor core takes 64 at a time.
DTYPES = (torch.bfloat16, torch.float16)
OUTPUTS = 64
STAGES = 3


def rows_of(rows: int) -> int:
    """Return the rows that a program multiplies at once, of this many."""
    return int(min(128, max(32, triton.next_power_of_2(rows))))


def warps_of(block: int) -> int:
    """Return the warps of a program for a block of rows; sums of 128 fill the registers of eight."""
    return 8 if block > 64 else 4


@triton.jit
def _inputs(x, m, k, rows, ld, inputs):
    """Return activations of inputs ``k`` and rows ``m``; 0 behind the last of either."""
    inside = (k < inputs)[:, None] & (m < rows)[None, :]
    return tl.load(x + m[None, :].to(tl.int64) * ld + k[:, None], mask=inside, other=0.0)


@triton.jit
def _bytes(codes, n, line, ld, lines):
    """Return bytes of outputs ``n`` and ``line`` of codes; 0 behind the last of either."""
    inside = (n < ld)[:, None] & (line < lines)[None, :]
    return tl.load(codes + line[None, :].to(tl.int64) * ld + n[:, None], mask=inside, other=0)


@triton.jit
def _number(level, kind: tl.constexpr):
    """Return levels below 128 as numbers, by the bits of a number whose last place is worth 1.

    Conversions of integers are an eighth as fast.
    """
    if kind == tl.bfloat16:
        found = (level.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
    elif kind == tl.float16:
        found = (level.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    else:
        found = level.to(kind)
    return found


@triton.jit(do_not_specialize=["rows", "share", "pieces"])
def _tiles(
    x, codes, step, offset, bias, out, part, lock,
    rows, ld_x, inputs, outputs, ld, share, pieces,
    BITS: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    IN: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    groups = (inputs + 63) // 64
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in range(piece * share, tl.minimum(piece * share + share, groups)):
        k = group * 64
        if BITS == 8:
            line = k + tl.arange(0, 64)
            w = _bytes(codes, n, line, ld, inputs)
            a = _inputs(x, m, line, rows, ld_x, inputs)
            acc = tl.dot(w.to(IN), a, acc, input_precision="ieee")
        else:
            if BITS == 4:
                both = _bytes(codes, n, group * 32 + tl.arange(0, 32), ld, groups * 32)
                at = k + tl.arange(0, 32)
                a = _inputs(x, m, at, rows, ld_x, inputs)
                b = _inputs(x, m, at + 32, rows, ld_x, inputs)
                found = tl.dot(_number(both & 15, IN), a, input_precision="ieee")
                found = tl.dot(_number(both >> 4, IN), b, found, input_precision="ieee")
                total = a.to(tl.float32) + b.to(tl.float32)
            else:
                line = group * 48 + tl.arange(0, 16)
                first = _bytes(codes, n, line, ld, groups * 48)
                second = _bytes(codes, n, line + 16, ld, groups * 48)
                upper = _bytes(codes, n, line + 32, ld, groups * 48)
                at = k + tl.arange(0, 16)
                a = _inputs(x, m, at, rows, ld_x, inputs)
                b = _inputs(x, m, at + 16, rows, ld_x, inputs)
                c = _inputs(x, m, at + 32, rows, ld_x, inputs)
                d = _inputs(x, m, at + 48, rows, ld_x, inputs)
                w = _number((first & 15) | ((upper & 3) << 4), IN)
                found = tl.dot(w, a, input_precision="ieee")
                w = _number((second & 15) | ((upper & 12) << 2), IN)
                found = tl.dot(w, b, found, input_precision="ieee")
                w = _number((first >> 4) | (upper & 48), IN)
                found = tl.dot(w, c, found, input_precision="ieee")
                w = _number((second >> 4) | ((upper & 192) >> 2), IN)
                found = tl.dot(w, d, found, input_precision="ieee")
                total = a.to(tl.float32) + b.to(tl.float32)
                total += c.to(tl.float32) + d.to(tl.float32)
            total = tl.sum(total, 0)
            s = tl.load(step + group * ld + n, mask=n < ld, other=0.0).to(tl.float32)
            o = tl.load(offset + group * ld + n, mask=n < ld, other=0.0).to(tl.float32)
            acc += found * s[:, None] + o[:, None] * total[None, :]
    if BITS == 8:
        acc = acc * tl.load(step + n, mask=n < ld, other=0.0)[:, None]
    held = (n < outputs)[:, None] & (m < rows)[None, :]
    place = m[None, :].to(tl.int64) * outputs + n[:, None]
    last = piece == 0
    if not WHOLE:
        size = rows.to(tl.int64) * outputs
        tl.store(part + piece * size + place, acc, mask=held)
        tl.debug_barrier()
        mine = lock + tile * tl.num_programs(2) + tl.program_id(2)
        last = tl.atomic_add(mine, 1, sem="acq_rel") == pieces - 1
        if last:
            tl.store(mine, 0)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for one in range(pieces):
                here = part + one * size + place
                acc += tl.load(here, mask=held, other=0.0, cache_modifier=".cg")
    if last:
        if BIAS:
            acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=held)


def launch(
    x: Tensor, codes: Tensor, step: Tensor, offset: Tensor | None, bias: Tensor | None, out: Tensor,
    bits: int, outputs: int, pieces: int, share: int,
) -> None:  # fmt: skip
    """Multiply ``x [rows, in]`` by codes; write ``out [rows, outputs]``, of any dtype.

    ``pieces`` programs share the inputs of a tile, ``share`` groups each.
    """
    rows, inputs = x.shape
    block = rows_of(rows)
    tiles, blocks = triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, block)
    part = lock = out
    if pieces > 1:
        part = torch.empty(pieces, rows, outputs, dtype=torch.float32, device=x.device)
        lock = counters_of(x.device, tiles * blocks)
    with torch.cuda.device_of(x):
        _tiles[(tiles, pieces, blocks)](
            x, codes, step, step if offset is None else offset, out if bias is None else bias, out,
            part, lock, rows, x.stride(0), inputs, outputs, codes.shape[1], share, pieces,
            BITS=bits, BIAS=bias is not None, WHOLE=pieces == 1, BLOCK_N=OUTPUTS, BLOCK_M=block,
            num_warps=warps_of(block), num_stages=STAGES,
        )  # fmt: skip
