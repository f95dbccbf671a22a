"""Fuses what a layer does between its matmuls, one Triton kernel each.

Torch's own operators make five to ten small kernels of a norm or a rotation; in a captured step each
costs a launch and a way through memory. Rounding follows the reference step by step, so that results
agree to the last bit but one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel.device.kv_cache import KVCache
from lantern_accel_cuda.kernels.operators import operator

#: Heads that a program rotates, and its warps: a plain step has few nodes, so that heads fill a card.
HEADS, WARPS = 2, 1


@triton.jit
def _rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    value = tl.load(x + row * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    # Back to the dtype before the weight: LlamaGen's order.
    value = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + d, (value * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + d, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_pairs(x, c, s, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr):
    """Rotate pairs of neighbours of ``x [BLOCK_H, 2 BLOCK_P]`` in float32."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [BLOCK_H, BLOCK_P, 2]))
    turned = tl.join(even * c - odd * s, odd * c + even * s)
    return tl.reshape(turned, [BLOCK_H, 2 * BLOCK_P])


@triton.jit(do_not_specialize=["nodes", "c_row"])
def _rotate_write(
    qkv, cos, sin, address, cache_k, cache_v, q_out,
    nodes, capacity, x_row, x_node, x_part, x_head, c_row, c_node,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    node = tl.program_id(1)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, 2 * BLOCK_P)
    # Whole lines are read and written: pairs part and join in registers.
    inside = (h < HEADS)[:, None] & (d < WIDTH)[None, :]
    at = row * c_row + node * c_node + p
    c = tl.load(cos + at, mask=p < WIDTH // 2, other=0.0)[None, :]
    s = tl.load(sin + at, mask=p < WIDTH // 2, other=0.0)[None, :]
    # Addresses count (row, head, slot); the first head's gives the slot of all.
    slot = tl.load(address + (row * nodes + node) * HEADS).to(tl.int64) - row * HEADS * capacity
    source = qkv + row * x_row + node * x_node + h[:, None] * x_head + d[None, :]
    out = ((row * nodes + node) * HEADS + h[:, None]) * WIDTH + d[None, :]
    place = ((row * HEADS + h[:, None]).to(tl.int64) * capacity + slot) * STORED + d[None, :]
    q = _rotate_pairs(tl.load(source, mask=inside, other=0.0), c, s, BLOCK_H, BLOCK_P)
    tl.store(q_out + out, q.to(q_out.dtype.element_ty), mask=inside)
    k = _rotate_pairs(tl.load(source + x_part, mask=inside, other=0.0), c, s, BLOCK_H, BLOCK_P)
    tl.store(cache_k + place, k.to(q_out.dtype.element_ty), mask=inside)
    v = tl.load(source + 2 * x_part, mask=inside, other=0.0)
    tl.store(cache_v + place, v, mask=inside)


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", lambda x, *rest: x.new_empty(x.shape)
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise ``x [..., D]`` in float32 and scale it, as the reference does."""
    width = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _rms_norm[(x.numel() // width,)](
            x, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=min(max(block // 512, 1), 8)
        )
    return out


@operator("swiglu(Tensor x) -> Tensor", lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x = [gate; up]``, ``[..., 2F]``."""
    width = x.shape[-1] // 2
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], width)
    with torch.cuda.device_of(x):
        _swiglu[(out.numel() // width, triton.cdiv(width, 1024))](
            x, out, WIDTH=width, BLOCK=1024, num_warps=4
        )
    return out


@operator(
    "rotate_write(Tensor qkv, Tensor cos, Tensor sin, Tensor address, Tensor(a!) k, Tensor(b!) v)"
    " -> Tensor",
    lambda qkv, *rest: qkv.new_empty((*qkv.shape[:2], *qkv.shape[3:])),
)
def rotate_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, address: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Rotate and store as :func:`rotate_write`, in a layer's caches ``k, v [R, H, L, >= d]``."""
    rows, nodes, _, heads, width = qkv.shape
    out = torch.empty(rows, nodes, heads, width, dtype=qkv.dtype, device=qkv.device)
    with torch.cuda.device_of(qkv):
        _rotate_write[(rows, nodes, triton.cdiv(heads, HEADS))](
            qkv, cos, sin, address, k, v, out,
            nodes, k.shape[2],
            qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            HEADS=heads, WIDTH=width, STORED=k.shape[3],
            BLOCK_H=HEADS, BLOCK_P=triton.next_power_of_2(width // 2), num_warps=WARPS,
        )  # fmt: skip
    return out


def rotate_write(
    qkv: Tensor, rotary: tuple[Tensor, Tensor], kv: KVCache, layer: int, address: Tensor
) -> Tensor:
    """Rotate q and k of ``qkv [R, T, 3, H, d]``, store k and v of a layer; return q ``[R, T, H, d]``.

    ``rotary``: cos and sin, float32 ``[R or 1, T, 1, 1, d/2]``; ``address`` as
    :meth:`TensorOps.address` gives it.
    """
    return rotate_store(qkv, *rotary, address, *kv.by_head(layer, kv.layout.capacity))
