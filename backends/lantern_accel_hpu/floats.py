"""Weights of a drafting copy as floating-point numbers of 8 bits, which the matrix engine multiplies.

What the vendor's serving code does: ``cast_to_fp8_v2`` and ``fp8_gemm_v2``, a scale for each row of
weights and one for each row of activations. A weight is read at 8 bits, and nothing is computed for every
one of them, as it is for integer codes (:mod:`lantern_accel_hpu.rounded`). Activations are rounded as
well: the target, which stays as it is, checks what comes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.nn.rounding import Rounding

#: The dtype of codes, and its largest number on a Gaudi 2: larger ones, up to the 448 of other devices,
#: are infinite there.
CODES, LARGEST = torch.float8_e4m3fn, 240.0


def multiplies_floats() -> bool:
    """Return whether this bridge has the two operators."""
    return hasattr(torch.ops.hpu, "cast_to_fp8_v2") and hasattr(torch.ops.hpu, "fp8_gemm_v2")


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows ``[n, in]`` as codes, and the step of each row, float32 ``[n, 1]``."""
    most = x.abs().amax(dim=-1, keepdim=True).float()
    step = torch.where(most > 0, most / LARGEST, 1.0)
    codes, _ = torch.ops.hpu.cast_to_fp8_v2(x, step.reciprocal(), False, False, CODES)
    return codes, step


@dataclass(frozen=True, eq=False)
class Floats:
    """A matrix ``[out, in]`` of floating-point codes with a step a row, float32 ``[out]``."""

    rounding: Rounding
    shape: tuple[int, int]
    codes: Tensor
    step: Tensor

    @classmethod
    def of(cls, how: Rounding, weight: Tensor) -> Floats:
        """Round a matrix."""
        codes, step = _round_rows(weight.detach())
        return cls(how, (weight.shape[0], weight.shape[1]), codes, step.flatten())

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.step))

    @property
    def bits_per_weight(self) -> float:
        """Bits that a pass reads for a weight."""
        return float(self.rounding.bits)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the codes stand for, ``[out, in]``."""
        return (self.codes.float() * self.step.unsqueeze(1)).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x [..., in]``, each row rounded with a step of its own: ``[..., out]``."""
        codes, step = _round_rows(x.reshape(-1, x.shape[-1]))
        out: Tensor = torch.ops.hpu.fp8_gemm_v2(
            codes, False, self.codes, True, None, x.dtype, step, self.step, bias, False
        )
        return out.view(*x.shape[:-1], self.shape[0])
