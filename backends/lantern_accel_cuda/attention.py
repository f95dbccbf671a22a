"""Key-value caches by head, and attention over them with torch's own operators.

A head's keys are one matrix ``[capacity, head_dim]``, so that attention reads whole lines of memory.
Slots are padded to a multiple of 8: torch's kernel copies a mask whose rows do not begin at multiples
of 16 bytes. Heads are padded to a multiple of 8 elements (LlamaGen's 3B has heads of 100): it falls
back to a slow path for others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.backend import KVCache, KVLayout

SLOT_MULTIPLE = 8
WIDTH_MULTIPLE = 8


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout(
    layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
) -> KVLayout:
    """Return a padded layout by head."""
    return KVLayout(
        layers,
        rows,
        _up(capacity, SLOT_MULTIPLE),
        heads,
        _up(head_dim, WIDTH_MULTIPLE),
        dtype,
        head_major=True,
    )


def address(kv: KVCache, slots: Tensor) -> Tensor:
    """Return indices of (row, head, slot) in one layer's keys, flat: ``[R * T * H]``."""
    at = kv.layout
    rows = torch.arange(at.rows, dtype=slots.dtype, device=slots.device).view(-1, 1, 1)
    heads = torch.arange(at.heads, dtype=slots.dtype, device=slots.device)
    flat = (rows * at.heads + heads) * at.capacity + slots.unsqueeze(-1)
    return flat.reshape(-1).long()  # index_copy_ takes no other dtype


def write(kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
    """Store ``k, v [R, T, H, d]`` of one layer at ``address``; padding stays zero."""
    width = k.shape[-1]
    flat = kv.data[layer].flatten(1, 3)[..., :width]
    flat[0].index_copy_(0, address, k.reshape(-1, width))
    flat[1].index_copy_(0, address, v.reshape(-1, width))


def commit(kv: KVCache, source: Tensor, target: Tensor) -> None:
    """Move entries of all layers from addresses ``source`` to ``target``."""
    flat = kv.data.flatten(2, 4).flatten(0, 1)
    flat.index_copy_(1, target, flat.index_select(1, source))


def sdpa(q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
    """Attend with torch's kernel under an additive mask; ``q [R, T, H, d]``, same shape out."""
    k, v = kv.data[layer].unbind(0)
    width, stored = q.shape[-1], k.shape[-1]
    padded = F.pad(q, (0, stored - width)) if stored > width else q
    out = F.scaled_dot_product_attention(
        padded.transpose(1, 2), k, v, attn_mask=mask, scale=width**-0.5
    )
    return out.transpose(1, 2)[..., :width]


def matmul(q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
    """Attend by two batched matrix products and a softmax; ``q [R, T, H, d]``, same shape out."""
    width = q.shape[-1]
    k, v = kv.data[layer][..., :width].unbind(0)
    scores = torch.matmul(q.transpose(1, 2) * width**-0.5, k.transpose(2, 3))
    return torch.matmul((scores + mask).softmax(dim=-1), v).transpose(1, 2)
