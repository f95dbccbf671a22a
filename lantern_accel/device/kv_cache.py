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


@dataclass(frozen=True)
class KVCache:
    """A key-value cache at fixed addresses: one tensor of keys and one of values per layer.

    Each has the layout's shape, and a step writes it once, in place (or several times, where the layout
    says ``rewritten``). A compiler then sees separate buffers that it can update where they are. Only
    the device's :class:`~.operations.TensorOps` looks inside. ``first``: integer, where each piece of a
    layer begins (see :meth:`~.operations.TensorOps.pieces`); None: not made beforehand.
    """

    layout: KVLayout
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    first: Tensor | None = None

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every tensor that holds a part of the cache."""
        return (*self.keys, *self.values)


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
