"""The static key-value cache: its layout, its tensors, and where one pass writes and looks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVLayout:
    """Size and order of one static key-value cache.

    ``capacity`` counts slots per row. Every layer has one tensor of keys and one of values. The
    reference order is ``[rows * capacity, heads, head_dim]``: a slot of a row is one contiguous piece
    of memory. With ``head_major`` it is ``[rows * heads * capacity, head_dim]``: a head's keys are one
    matrix.

    ``rewritten``: one function writes it several times, as a drafter does level by level. A compiler
    that makes the only write of a buffer in place may lose one of several.
    """

    layers: int
    rows: int
    capacity: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    head_major: bool = False
    rewritten: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer's keys, and of its values."""
        if self.head_major:
            return (self.rows * self.heads * self.capacity, self.head_dim)
        return (self.rows * self.capacity, self.heads, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes that a cache of this layout holds."""
        return 2 * self.layers * self.dtype.itemsize * math.prod(self.shape)

    def pieces(self, device: torch.device, index: torch.dtype) -> Tensor:
        """Return where each row, or each head of each row, begins in a layer's tensor, integer."""
        end = self.rows * (self.heads if self.head_major else 1) * self.capacity
        return torch.arange(0, end, self.capacity, device=device, dtype=index)


@dataclass(frozen=True)
class KVCache:
    """A key-value cache at fixed addresses: one tensor of keys and one of values per layer.

    Each has the layout's shape, and a step writes it once, in place (or several times, where the layout
    says ``rewritten``). A compiler then sees separate buffers that it can update where they are. Only
    the device's :class:`~.operations.TensorOps` looks inside. ``first``: integer, where each piece of a
    layer begins (:meth:`KVLayout.pieces`); None: not made beforehand.
    """

    layout: KVLayout
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    first: Tensor | None = None

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every tensor that holds a part of the cache."""
        return (*self.keys, *self.values)

    def by_head(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first ``count`` slots as views, ``[R, H, count, d]`` each."""
        at, sides = self.layout, (self.keys[layer], self.values[layer])
        if at.head_major:
            shape = (at.rows, at.heads, at.capacity, at.head_dim)
            k, v = (side.view(shape) for side in sides)
        else:
            shape = (at.rows, at.capacity, at.heads, at.head_dim)
            k, v = (side.view(shape).transpose(1, 2) for side in sides)
        return (k, v) if count == at.capacity else (k[:, :, :count], v[:, :, :count])

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of slots, int ``[R, T]``, as ``[R, T, H, d]`` each.

        Nothing is computed, so that what was written can be compared bit for bit. Not for a step.
        """
        at = self.layout
        index = slots.long().view(at.rows, 1, -1, 1).expand(-1, at.heads, -1, at.head_dim)
        k, v = (t.gather(2, index).transpose(1, 2) for t in self.by_head(layer, at.capacity))
        return k, v


@dataclass(frozen=True)
class Pass:
    """Where one forward pass reads and writes.

    ``cos, sin``: float32 ``[R or 1, T, 1, d/2]`` rotary rows of the queries. ``cache``: None for a pass
    without a cache (training), else ``address`` says where the pass stores its keys and values (see
    :meth:`~.operations.TensorOps.address`). ``mask``: the device's form of ``[R, 1, T, L]``; None is
    causal.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None
    cache: KVCache | None = None
    address: Tensor | None = None
