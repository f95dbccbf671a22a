"""Key-value caches by head, and attention over them with torch's own operators.

A head's keys are one matrix ``[capacity, head_dim]``, so that attention reads whole lines of memory.
Slots are padded to a multiple of 16: a mask's rows then begin at multiples of 16 bytes. Torch's kernel
copies other masks, and the Triton kernel loads them byte by byte. Heads are padded to a multiple of 8
elements (LlamaGen's 3B has heads of 100): torch's kernel falls back to a slow path for others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.kv_cache import KVLayout

SLOT_MULTIPLE = 16
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


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with torch's kernel under an additive mask; ``q [R, T, H, d]``, same shape out.

    ``k, v [R, H, L, d']`` with heads as wide as they are stored.
    """
    width, stored = q.shape[-1], k.shape[-1]
    padded = F.pad(q, (0, stored - width)) if stored > width else q
    out = F.scaled_dot_product_attention(
        padded.transpose(1, 2), k, v, attn_mask=mask, scale=width**-0.5
    )
    return out.transpose(1, 2)[..., :width]
