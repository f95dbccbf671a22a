"""The key-value cache on a CPU: one matrix of slots, heads first, and attention over it.

All layers' keys and values are rows of one matrix ``[layers * 2 * R * H * capacity, d]``, so that a
layer stores both with one copy, a commit is one copy for all layers, and a compiler sees one buffer
that is changed in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.device.backend import KVCache, KVLayout


def allocate(layout: KVLayout) -> KVCache:
    """Allocate a zeroed cache; ``views`` is the matrix of slots and each layer's keys and values."""
    shape = (layout.nbytes // layout.dtype.itemsize // layout.head_dim, layout.head_dim)
    slots = torch.zeros(shape, dtype=layout.dtype)
    return KVCache(layout, slots.view(layout.shape), (slots, _halves(slots, layout)))


def _halves(slots: Tensor, layout: KVLayout) -> list[tuple[Tensor, Tensor]]:
    """Return every layer's keys, transposed ``[R * H, d, L]``, and values ``[R * H, L, d]``."""
    shape = (layout.layers, 2, layout.rows * layout.heads, layout.capacity, layout.head_dim)
    return [(k.transpose(1, 2), v) for k, v in (pair.unbind(0) for pair in slots.view(shape))]


def address(layout: KVLayout, slots: Tensor) -> Tensor:
    """Return rows of the matrix for slots ``[R, T]``: ``[layers, 2 * R * T * H]``, keys first."""
    kind = slots.dtype
    device = slots.device
    heads = torch.arange(layout.rows * layout.heads, dtype=kind, device=device) * layout.capacity
    halves = torch.arange(2 * layout.layers, dtype=kind, device=device).view(-1, 1, 1, 1) * (
        layout.rows * layout.heads * layout.capacity
    )
    flat = halves + heads.view(layout.rows, 1, layout.heads) + slots.unsqueeze(-1)
    return flat.view(layout.layers, -1).long()


def write(kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
    """Store ``k, v [R, T, H, d]`` of one layer."""
    kv.views[0].index_copy_(0, address[layer], torch.stack((k, v)).view(-1, k.shape[-1]))


def commit(kv: KVCache, source: Tensor, target: Tensor) -> None:
    """Move entries of all layers from addresses ``source`` to ``target``."""
    slots: Tensor = kv.views[0]
    slots.index_copy_(0, target.view(-1), slots.index_select(0, source.view(-1)))


def attend(q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
    """Attention of ``q [R, T, H, d]`` over a layer's cache under ``mask [R, 1, T, L]``.

    Batched matrix products in bfloat16 take a third of the time of torch's attention kernel at the
    few rows of a step, which is made for long queries.
    """
    rows, count, heads, width = q.shape
    slots, halves = kv.views
    compiling = torch.compiler.is_compiling()
    # The compiler would take views made outside for buffers of their own.
    k, v = (_halves(slots, kv.layout) if compiling else halves)[layer]
    if compiling and count == 1:
        # It would write the product of one row as a loop, ten times as slow.
        q = q.expand(-1, 2, -1, -1)
    scaled = (q * width**-0.5).transpose(1, 2).reshape(rows * heads, -1, width)
    scores = torch.bmm(scaled, k).view(rows, heads, -1, k.shape[-1])
    weights = (scores + mask).softmax(dim=-1).flatten(0, 1)
    out = torch.bmm(weights, v).view(rows, heads, -1, width)
    return out.transpose(1, 2)[:, :count]
