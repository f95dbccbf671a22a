"""Quantized weights as a Gaudi multiplies them: one code a byte, cast in front of the matrix engine.

Every operator and every dtype of a product is one that release 1.19 of the bridge has: int8 becomes
bfloat16 by one kernel (``cast_i8_to_bf16``), where uint8 takes two, so codes are int8. None takes codes
apart in a step: of the vendor's own tests, those that shift int8 or uint8 are expected to fail. A matrix
is therefore read at 8 bits a weight, in ``int6`` and ``int4`` too, plus their steps and offsets.

The vendor's ``hpu::convert_from_uint4`` reads 4 bits, and without zero points a code times its step would
be what is wanted. It is left out: it does not run in eager mode, where quality losses are measured, it is
documented for lazy mode alone, and whether it takes steps by group without zero points shows on a card.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.nn.rounding import Rounded, Rounding, unpack_levels

#: Weights that are taken apart at a time, which takes several times their memory.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class ByteCodes:
    """A matrix ``[out, in]`` of codes, int8, one a byte.

    With a step a row: ``codes [out, in]``, ``step`` float32 ``[out]``, no ``offset``. By groups:
    ``codes [groups, group, out]``, ``step`` and ``offset`` bfloat16 ``[groups, 1, out]``. Outputs come
    last there: a vector of the device holds the codes of many outputs, and as many steps.
    """

    rounding: Rounding
    shape: tuple[int, int]
    codes: Tensor
    step: Tensor
    offset: Tensor | None

    @classmethod
    def of(cls, weight: Rounded) -> ByteCodes:
        """Put a matrix in this order; nothing is rounded."""
        how, codes = weight.rounding, weight.codes
        if weight.offset is None:
            return cls(how, weight.shape, codes, weight.step.flatten().contiguous(), None)
        step, offset = (t.t().unsqueeze(1).contiguous() for t in (weight.step, weight.offset))
        parts = torch.split(codes, max(1, _AT_ONCE // weight.shape[1]))
        # Of int32, since shifts of bytes may be wrong here.
        levels = [unpack_levels(part.int(), how.bits).to(torch.int8) for part in parts]
        codes = torch.cat(levels).permute(1, 2, 0).contiguous()
        return cls(how, weight.shape, codes, step, offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        parts = (self.codes, self.step, *(() if self.offset is None else (self.offset,)))
        return sum(t.numel() * t.element_size() for t in parts)

    @property
    def bits_per_weight(self) -> float:
        """Bits that a pass reads for a weight."""
        return 8 + self.rounding.bits_per_weight - self.rounding.bits

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the codes stand for, ``[out, in]`` (:meth:`.Rounded.dense`)."""
        if self.offset is None:
            return (self.codes.float() * self.step.unsqueeze(1)).to(dtype)
        return self._whole(torch.float32).t().to(dtype)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        """Return weights by groups, ``[in, out]``, computed in ``dtype``; codes are exact in either."""
        assert self.offset is not None
        made = self.codes.to(dtype) * self.step + self.offset
        return made.flatten(0, 1)[: self.shape[1]]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x [..., in]``: ``[..., out]``, in its dtype, in four operators and one for a bias.

        With a step a row, codes are the matrix, as they are exact in bfloat16, and the step is applied
        to the result: the weights see one cast and nothing else. Steps are float32, since one in
        bfloat16 would be off for a whole row alike. By groups, the sum over a group would have to leave
        the matrix engine before its step, for 64 inputs at a time, so weights are made of codes: a
        cast, a product and a sum, elementwise, which a compiler can do slice by slice. In bfloat16 they
        are off by a rounding more than the reference's, which makes them in float32.
        """
        if self.offset is None:
            out = F.linear(x, self.codes.to(x.dtype)) * self.step
            return (out if bias is None else out + bias).to(x.dtype)
        rows, weight = x.reshape(-1, x.shape[-1]), self._whole(x.dtype)
        # Not F.linear of a transposed matrix: the matrix lies the way that it is multiplied.
        out = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        return out.view(*x.shape[:-1], -1)
