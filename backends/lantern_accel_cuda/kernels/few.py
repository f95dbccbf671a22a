"""Products of few rows with what stands before and behind them in a layer, one Triton kernel each.

A program takes a tile of outputs and a piece of the inputs; it reads each of its weights once for all
rows. Before the product a norm's weight is multiplied in, and the squares of the row are summed on the
way: the scale, one number a row, is applied to the sums. Where a tile's inputs are shared among programs,
the last of them adds what all have found, in one order. It goes on with what follows: it adds the
residual, gates, or rotates queries and keys and writes the caches.

Outputs that are used together, a gate with its factor or the two numbers of a rotated pair, lie side by
side in one product, which is split behind it: of two products that share an operand Triton lays all warps
along the rows, where they repeat each other's. Neither tiles nor pieces depend on the number of rows, so
that equal rows give equal bits in steps of any length. Programs that read the same weights, for other
rows, start one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel_cuda.kernels.counters import counters_of
from lantern_accel_cuda.kernels.operators import operator

#: What steps are served in. Float16 could not hold a norm's input times its weight, and float32 is there
#: for exactness and not for speed.
DTYPES = (torch.bfloat16,)
#: Rows that the kernels serve, and that a program multiplies at a time, at most: more would take other
#: instructions on sm_90, whose sums are rounded in another way.
MOST_ROWS, ROWS = 64, 32
#: Programs for each multiprocessor, where inputs can be shared among this many; blocks of inputs of each.
PROGRAMS, LEAST_BLOCKS = 2, 2

#: What follows the sums.
STORE, ADD, GATE, ROTATE = (tl.constexpr(n) for n in range(4))


class Shape(NamedTuple):
    """Outputs, both of a pair, and inputs that a program takes at once, its warps and stages."""

    outputs: int
    inputs: int
    warps: int
    stages: int


#: The shapes among which a card's measurement chooses; the first serves where nothing is measured.
SHAPES = (Shape(32, 128, 4, 4), Shape(64, 64, 4, 4))


@triton.jit
def _block(weight, line, k, inputs, outputs):
    """Return weights of inputs ``k`` and outputs ``line``, side by side as a product takes them."""
    inside = (k < inputs)[:, None] & (line < outputs)[None, :]
    at = line[None, :].to(tl.int64) * inputs + k[:, None]
    return tl.load(weight + at, mask=inside, other=0.0)


@triton.jit
def _end(
    first, second, out, cos, sin, address, cache_k, cache_v, m, n, rows, count,
    nodes, heads, capacity, c_row, c_node,
    AFTER: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """Do what follows the sums of rows ``m`` and outputs, or pairs of them, ``n``."""
    inside = (m < rows)[:, None] & (n < count)[None, :]
    at = m[:, None].to(tl.int64) * count + n[None, :]
    if AFTER == 0:
        tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    if AFTER == 1:
        first += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    if AFTER >= 2:
        # Rounded where the reference's product ends, as what follows reads it.
        a = first.to(IN).to(tl.float32)
        b = second.to(IN).to(tl.float32)
    if AFTER == 2:
        a = (a / (1.0 + tl.exp(-a))).to(IN).to(tl.float32)
        tl.store(out + at, (a * b).to(IN), mask=inside)
    if AFTER == 3:
        half: tl.constexpr = WIDTH // 2
        row = m // nodes
        p = n % half
        head = (n // half) % heads
        part = n // (half * heads)
        angle = (row * c_row + (m % nodes) * c_node)[:, None] + p[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        turned = (part < 2)[None, :]
        x = tl.where(turned, a * c - b * s, a).to(IN)
        y = tl.where(turned, b * c + a * s, b).to(IN)
        q = inside & (part == 0)[None, :]
        at = (m[:, None] * heads + head[None, :]) * WIDTH + 2 * p[None, :]
        tl.store(out + at, x, mask=q)
        tl.store(out + at + 1, y, mask=q)
        # Addresses count (row, head, slot); the first head's gives the slot of all.
        slot = tl.load(address + m * heads, mask=m < rows, other=0).to(tl.int64)
        slot -= row.to(tl.int64) * heads * capacity
        place = (row[:, None] * heads + head[None, :]).to(tl.int64) * capacity + slot[:, None]
        place = place * STORED + 2 * p[None, :]
        k = inside & (part == 1)[None, :]
        tl.store(cache_k + place, x, mask=k)
        tl.store(cache_k + place + 1, y, mask=k)
        v = inside & (part == 2)[None, :]
        tl.store(cache_v + place, x, mask=v)
        tl.store(cache_v + place + 1, y, mask=v)


@triton.jit(do_not_specialize=["rows", "count", "share", "pieces", "nodes", "heads", "c_row"])
def _few(
    x, weight, gain, out, cos, sin, address, cache_k, cache_v, part, squares, lock,
    eps, rows, inputs, count, share, pieces, nodes, heads, capacity, c_row, c_node,
    NORM: tl.constexpr, AFTER: tl.constexpr, WHOLE: tl.constexpr,
    WIDTH: tl.constexpr, STORED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Blocks of rows are the fastest axis: what one of them reads, the others find in the cache.
    tile = tl.program_id(1)
    piece = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    line = tile * BLOCK_N + j
    outputs = count if AFTER < 2 else 2 * count
    if AFTER == 2:  # halves of all outputs are pairs; where pairs are rotated, neighbours are
        line = tl.where(line < outputs, line // 2 + (j % 2) * count, outputs)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    end = tl.minimum(piece * share + share, (inputs + BLOCK_K - 1) // BLOCK_K)
    for block in range(piece * share, end):
        # Blocks are counted, so that the compiler knows how what it loads is aligned.
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (m < rows)[:, None] & (k < inputs)[None, :]
        a = tl.load(x + m[:, None] * inputs + k[None, :], mask=inside, other=0.0)
        w = _block(weight, line, k, inputs, outputs)
        if NORM:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            g = tl.load(gain + k, mask=k < inputs, other=0.0).to(tl.float32)
            a = (wide * g[None, :]).to(a.dtype)
        product = tl.dot(a, w, product, input_precision="ieee")
    last = piece == 0
    if not WHOLE:
        # The parts of a tile lie together: [tile, piece, row, output].
        held = (m < rows)[:, None] & (tile * BLOCK_N + j < outputs)[None, :]
        own = (tile * pieces + piece) * rows
        at = m[:, None] * BLOCK_N + j[None, :]
        tl.store(part + own * BLOCK_N + at, product, mask=held)
        if NORM:
            tl.store(squares + own + m, square, mask=m < rows)
        tl.debug_barrier()
        mine = lock + tile * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(mine, 1, sem="acq_rel") == pieces - 1
        if last:
            tl.store(mine, 0)
            product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            square = tl.zeros([BLOCK_M], tl.float32)
            for one in range(pieces):
                own = (tile * pieces + one) * rows
                there = part + own * BLOCK_N + at
                product += tl.load(there, mask=held, other=0.0, cache_modifier=".cg")
                if NORM:
                    there = squares + own + m
                    square += tl.load(there, mask=m < rows, other=0.0, cache_modifier=".cg")
    if last:
        if NORM:
            product = product * tl.rsqrt(square / inputs + eps)[:, None]
        if AFTER >= 2:
            n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            first, second = tl.split(tl.reshape(product, [BLOCK_M, BLOCK_N // 2, 2]))
        else:
            n, first, second = line, product, product
        _end(
            first, second, out, cos, sin, address, cache_k, cache_v, m, n, rows, count,
            nodes, heads, capacity, c_row, c_node,
            AFTER=AFTER, WIDTH=WIDTH, STORED=STORED, IN=x.dtype.element_ty,
        )  # fmt: skip


def pieces_of(inputs: int, outputs: int, shape: Shape, cores: int) -> int:
    """Return among how many programs the inputs of a tile are shared, on a card of ``cores``."""
    tiles, blocks = -(-outputs // shape.outputs), -(-inputs // shape.inputs)
    return max(1, min(-(-PROGRAMS * cores // tiles), blocks // LEAST_BLOCKS))


def _launch(
    x: Tensor, weight: Tensor, gain: Tensor | None, eps: float, out: Tensor, after: int, count: int,
    chosen: int, cores: int, places: tuple[Tensor, ...] = (), nodes: int = 1, heads: int = 1,
    capacity: int = 1, width: int = 2, stored: int = 2,
) -> None:  # fmt: skip
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs).contiguous()
    rows, shape = len(flat), SHAPES[chosen]
    held = 16 if rows <= 16 else ROWS
    pieces = pieces_of(inputs, outputs, shape, cores)
    blocks = triton.cdiv(inputs, shape.inputs)
    share = triton.cdiv(blocks, pieces)
    pieces = triton.cdiv(blocks, share)
    tiles, whole = triton.cdiv(outputs, shape.outputs), pieces == 1
    part = squares = lock = out
    if not whole:
        size = tiles * pieces * rows
        part = torch.empty(size * shape.outputs, dtype=torch.float32, device=x.device)
        squares = torch.empty(size, dtype=torch.float32, device=x.device)
        lock = counters_of(x.device, tiles * triton.cdiv(rows, held))
    cos, sin, address, k, v = places or (out,) * 5
    shared = bool(places) and cos.shape[0] == 1
    with torch.cuda.device_of(x):
        _few[(triton.cdiv(rows, held), tiles, pieces)](
            flat, weight, flat if gain is None else gain, out, cos, sin, address, k, v,
            part, squares, lock,
            eps, rows, inputs, count, share, pieces, nodes, heads, capacity,
            0 if shared or not places else cos.stride(0), cos.stride(1) if places else 1,
            NORM=gain is not None, AFTER=after, WHOLE=whole, WIDTH=width, STORED=stored,
            BLOCK_M=held, BLOCK_N=shape.outputs, BLOCK_K=shape.inputs,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def _sums_like(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32)


@operator("few_sums(Tensor x, Tensor weight, int shape, int cores) -> Tensor", _sums_like)
def sums(x: Tensor, weight: Tensor, shape: int, cores: int) -> Tensor:
    """Multiply ``x [..., in]`` by ``weight [out, in]``; the sums in float32, ``[..., out]``.

    ``shape``: one of :data:`SHAPES`, by number; ``cores``: the card's multiprocessors.
    """
    out = _sums_like(x, weight)
    _launch(x, weight, None, 0.0, out, 0, weight.shape[0], shape, cores)
    return out


@operator("few_add(Tensor x, Tensor weight, Tensor(a!) out, int shape, int cores) -> ()")
def add(x: Tensor, weight: Tensor, out: Tensor, shape: int, cores: int) -> None:
    """Add the product of ``x [..., in]`` and ``weight [out, in]`` to ``out [..., out]``, contiguous."""
    _launch(x, weight, None, 0.0, out, 1, weight.shape[0], shape, cores)


def _gate_like(x: Tensor, gain: Tensor | None, eps: float, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@operator(
    "few_gate(Tensor x, Tensor? gain, float eps, Tensor weight, int shape, int cores) -> Tensor",
    _gate_like,
)
def gate(
    x: Tensor, gain: Tensor | None, eps: float, weight: Tensor, shape: int, cores: int
) -> Tensor:
    """Normalise ``x [..., in]``, multiply by ``[gate; up]``, ``[2F, in]``; return ``silu(gate) * up``.

    ``gain [in]``: the norm's weight; None: there is no norm.
    """
    out = _gate_like(x, gain, eps, weight)
    _launch(x, weight, gain, eps, out, 2, out.shape[-1], shape, cores)
    return out


def _rotate_like(
    x: Tensor, gain: Tensor | None, eps: float, weight: Tensor, cos: Tensor, sin: Tensor,
    address: Tensor, k: Tensor, v: Tensor, heads: int, *rest: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:2], heads, weight.shape[0] // (3 * heads))


@operator(
    "few_rotate(Tensor x, Tensor? gain, float eps, Tensor weight, Tensor cos, Tensor sin,"
    " Tensor address, Tensor(a!) k, Tensor(b!) v, int heads, int shape, int cores) -> Tensor",
    _rotate_like,
)
def rotate(
    x: Tensor, gain: Tensor | None, eps: float, weight: Tensor, cos: Tensor, sin: Tensor,
    address: Tensor, k: Tensor, v: Tensor, heads: int, shape: int, cores: int,
) -> Tensor:  # fmt: skip
    """Normalise ``x [R, T, in]``, multiply by ``[q; k; v]``, rotate q and k, store k and v; return q.

    ``cos, sin``: float32 ``[R or 1, T, 1, 1, d/2]``; ``address`` as :meth:`TensorOps.address` gives it;
    ``k, v [R, H, L, >= d]``: a layer's caches, contiguous.
    """
    out = _rotate_like(x, gain, eps, weight, cos, sin, address, k, v, heads)
    _launch(
        x, weight, gain, eps, out, 3, weight.shape[0] // 2, shape, cores, (cos, sin, address, k, v),
        x.shape[1], heads, k.shape[2], out.shape[-1], k.shape[3],
    )  # fmt: skip
    return out
