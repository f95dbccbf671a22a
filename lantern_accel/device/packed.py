"""Weight matrices as a device multiplies them, and the quantized formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Packed(Protocol):
    """A matrix ``[out, in]`` in a device's own order; only the device looks further inside."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that it stands for, ``[out, in]``."""


#: A tensor ``[out, in]``, in the usual order or an opaque one, or another form of a matrix.
Weight = Tensor | Packed


class Format(Protocol):
    """Quantized weights (:class:`~lantern_accel.nn.rounding.Rounding`)."""

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def floating(self) -> bool:
        """Whether codes are floating-point numbers, which only some devices multiply."""

    def round_matrix(self, weight: Tensor, drafts: bool) -> Packed:
        """Round a matrix; raises RequestError for floating-point codes, which are a device's own."""


def dense(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix ``[out, in]`` that a packed one is multiplied as; a tensor keeps its dtype."""
    unpack: Callable[[torch.dtype], Tensor] | None = getattr(weight, "dense", None)
    if unpack is not None:  # some are tensors, too
        return unpack(dtype)
    assert isinstance(weight, Tensor)
    return weight if weight.layout == torch.strided else weight.to_dense()
