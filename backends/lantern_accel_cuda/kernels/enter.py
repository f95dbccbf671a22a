"""What stands before a pass over an image's nodes, in one Triton kernel.

One program a node of a row: it takes the node's token, and writes its embedding, its rotary rows, where
its keys and values lie, what it sees of the cache, and the token that its logits are of. All of it is
what :mod:`lantern_accel.decoding` does by operators, to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel_cuda.kernels.operators import operator

#: Slots of a mask that a program writes at once.
SLOTS = 1024


class Entered(NamedTuple):
    """What a pass over ``T`` nodes of ``R`` rows, ``B`` images, begins with.

    ``x [R, T, D]``: embeddings; ``mask`` int8 ``[M, 1, T, L]``, one of all rows where there is one image,
    else one a row; ``cos, sin`` float32 ``[R, T, 1, d/2]``; ``address`` int64 ``[R * T * H]``, as
    :meth:`.TensorOps.address` gives it by head; ``following [B, T]``: the tokens that logits are of.
    """

    x: Tensor
    mask: Tensor
    cos: Tensor
    sin: Tensor
    address: Tensor
    following: Tensor


@triton.jit(
    do_not_specialize=["images", "masks", "nodes", "prefix", "count", "limit", "capacity"]
)  # fmt: skip
def _enter(
    tokens, length, prefix_mask, table, cos, sin,
    x, mask, c_out, s_out, address, following,
    images, masks, nodes, prefix, count, limit, capacity,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64)
    row = here // nodes
    node = here % nodes
    image = row % images
    place = tl.load(length + image) + node
    cell = tl.minimum(place, count - 1)
    token = tl.load(tokens + image * (count + 1) + tl.minimum(place, count)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    row_of = tl.load(table + token * WIDTH + d, mask=d < WIDTH, other=0.0)
    tl.store(x + here * WIDTH + d, row_of, mask=d < WIDTH)
    p = tl.arange(0, BLOCK_P)
    at = (prefix + cell) * HALF + p
    tl.store(c_out + here * HALF + p, tl.load(cos + at, mask=p < HALF, other=0.0), mask=p < HALF)
    tl.store(s_out + here * HALF + p, tl.load(sin + at, mask=p < HALF, other=0.0), mask=p < HALF)
    # What is behind the image lies in the last of the slots that a step looks at, which nobody sees.
    slot = prefix + tl.minimum(place, limit)
    h = tl.arange(0, BLOCK_H)
    line = ((row * HEADS + h) * capacity + slot).to(address.dtype.element_ty)
    tl.store(address + here * HEADS + h, line, mask=h < HEADS)
    if row < images:
        after = tl.minimum(cell + 1, count - 1).to(following.dtype.element_ty)
        tl.store(following + here, after)
    if row < masks:
        for start in range(0, capacity, BLOCK_L):
            s = start + tl.arange(0, BLOCK_L)
            prompt = tl.load(prefix_mask + image * prefix + s, mask=s < prefix, other=0)
            known = (s >= prefix) & (s - prefix <= place) & (s - prefix < limit)
            seen = (prompt.to(tl.int32) > 0) | known
            tl.store(mask + here * capacity + s, seen.to(tl.int8), mask=s < capacity)


def _like(
    tokens: Tensor, length: Tensor, prefix_mask: Tensor, table: Tensor, cos: Tensor, sin: Tensor,
    nodes: int, branches: int, limit: int, capacity: int, heads: int,
) -> Entered:  # fmt: skip
    images, rows = len(length), branches * len(length)
    half = cos.shape[-1]
    return Entered(
        table.new_empty(rows, nodes, table.shape[1]),
        table.new_empty(1 if images == 1 else rows, 1, nodes, capacity, dtype=torch.int8),
        cos.new_empty(rows, nodes, 1, half),
        sin.new_empty(rows, nodes, 1, half),
        # What the operators give: `index_copy_` takes no other dtype.
        length.new_empty(rows * nodes * heads, dtype=torch.int64),
        length.new_empty(images, nodes),
    )


@operator(
    "enter_pass(Tensor tokens, Tensor length, Tensor prefix_mask, Tensor table, Tensor cos, Tensor sin,"
    " int nodes, int branches, int limit, int capacity, int heads)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like,
)
def _launch_enter(
    tokens: Tensor, length: Tensor, prefix_mask: Tensor, table: Tensor, cos: Tensor, sin: Tensor,
    nodes: int, branches: int, limit: int, capacity: int, heads: int,
) -> Entered:  # fmt: skip
    given = tokens, length, prefix_mask, table, cos, sin
    out = _like(*given, nodes, branches, limit, capacity, heads)
    images, width, half = len(length), table.shape[1], cos.shape[-1]
    with torch.cuda.device_of(table):
        _enter[(branches * images * nodes,)](
            *given, *out,
            images, len(out.mask), nodes, prefix_mask.shape[1], tokens.shape[1] - 1, limit, capacity,
            WIDTH=width, HALF=half, HEADS=heads,
            BLOCK_D=triton.next_power_of_2(width), BLOCK_P=triton.next_power_of_2(half),
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_L=min(SLOTS, triton.next_power_of_2(capacity)), num_warps=4,
        )  # fmt: skip
    return out


def enter(
    tokens: Tensor, length: Tensor, prefix_mask: Tensor, table: Tensor, rotary: tuple[Tensor, Tensor],
    nodes: int, branches: int, limit: int, capacity: int, heads: int,
) -> Entered:  # fmt: skip
    """Begin a pass over the ``nodes`` tokens of each image from position ``length [B]`` on.

    ``tokens [B, N + 1]``, ``prefix_mask`` bool ``[B, P]``; ``table [V, D]``: embeddings; ``rotary``: cos
    and sin, float32 ``[P + N, d/2]``. Of ``capacity`` slots a row has, the first P are the prompt's, and
    ``limit`` behind them the image's.
    """
    given = tokens, length, prefix_mask, table, *rotary
    return Entered(*_launch_enter(*given, nodes, branches, limit, capacity, heads))
