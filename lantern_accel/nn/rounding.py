"""Quantized weights: how a matrix is rounded, kept, and turned back.

A weight is an integer number of steps: ``offset + step * code``. With one step a row of outputs
(int8) the codes are signed and there is no offset; with one a group of inputs (int6, int4) they are
unsigned and count from an offset. Steps and offsets of groups are bfloat16, and codes are chosen
after these were rounded. Activations are left alone, so that every device computes the same model:
the one whose weights are :meth:`Rounded.dense`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import RequestError, did_you_mean


@dataclass(frozen=True)
class Rounding:
    """How weights are quantized: ``group`` inputs share a step and an offset.

    ``group`` 0: one step for a whole row of inputs, without an offset. ``floating``: codes are
    floating-point numbers, which a device rounds and multiplies itself (:meth:`.Ops.pack`); it rounds
    activations to such numbers, too, so that only a copy that drafts has them.
    """

    name: str
    bits: int
    group: int = 0
    floating: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes, steps and offsets, a weight; a row's step is not counted."""
        return self.bits + (32 / self.group if self.group else 0)

    def round_matrix(self, weight: Tensor, drafts: bool = False) -> Rounded:
        """Round a matrix, in a third of the time where it ``drafts``: no range of a group is cut then.

        Raises RequestError for floating-point codes, which only some devices have, for such copies.
        """
        if self.floating:
            way = "this is none: draft with int8" if drafts else "give the model int8, int6 or int4"
            raise RequestError(
                f"weights in {self.name} are for copies that draft (--strategy "
                f"self:drafts=self:4,{self.name}), on devices that multiply such numbers; {way}"
            )
        return round_weight(weight, self, 1 if drafts else TRIES)


#: The name of weights that are not quantized.
FULL = "full"
#: By the name that ``--weights`` takes.
ROUNDINGS = {
    one.name: one for one in (Rounding("int8", 8), Rounding("int6", 6, 64), Rounding("int4", 4, 64))
}
#: Further ones, which only some devices have.
OF_DEVICES = {one.name: one for one in (Rounding("fp8", 8, floating=True),)}
#: The largest part of a group's range that is given up for finer steps, and in how many tries.
_MOST_CUT, TRIES = 0.24, 9
#: Weights quantized at a time: what is tried takes several times their memory.
_AT_ONCE = 1 << 22


def rounding(name: str) -> Rounding:
    """Return a rounding by name; raises :class:`RequestError` for an unknown one."""
    known = ROUNDINGS | OF_DEVICES
    if name not in known:
        raise RequestError(
            f"weights cannot be {name[:40]!r}{did_you_mean(name, known)}; give full (as the model "
            f"has them), {', '.join(ROUNDINGS)}"
        )
    return known[name]


@dataclass(frozen=True, eq=False)
class Rounded:
    """A quantized matrix ``[out, in]``.

    ``codes``: int8 ``[out, in]`` with a step a row, else uint8 ``[out, groups, bytes]``, whose codes lie
    one after the other from the lowest bit on. ``step``: float32 ``[out, 1]``, or bfloat16
    ``[out, groups]``. ``offset``: bfloat16 ``[out, groups]``; None with a step a row.
    """

    rounding: Rounding
    shape: tuple[int, int]
    codes: Tensor
    step: Tensor
    offset: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        parts = (self.codes, self.step, *(() if self.offset is None else (self.offset,)))
        return sum(t.numel() * t.element_size() for t in parts)

    def levels(self) -> Tensor:
        """Return the codes, one a byte: int8 ``[out, in]``, or uint8 ``[out, groups, group]``."""
        if self.offset is None:
            return self.codes
        return unpack_levels(self.codes, self.rounding.bits)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the codes stand for, ``[out, in]``, computed in float32."""
        levels = self.levels().float()
        if self.offset is None:
            return (levels * self.step).to(dtype)
        made = levels * self.step.float().unsqueeze(-1) + self.offset.float().unsqueeze(-1)
        return made.flatten(1)[:, : self.shape[1]].to(dtype)


def pack_levels(levels: Tensor, bits: int) -> Tensor:
    """Return levels, uint8 ``[..., n]`` below ``2**bits``, one behind the other: ``[..., n bits / 8]``.

    ``n`` is a multiple of 4. Computed in int32: not every device that rounds a model shifts bytes.
    """
    levels = levels.int()
    if bits == 4:
        low, high = torch.unflatten(levels, -1, (-1, 2)).unbind(-1)
        return (low | high << 4).to(torch.uint8)
    a, b, c, d = torch.unflatten(levels, -1, (-1, 4)).unbind(-1)
    made = torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), dim=-1).flatten(-2)
    return (made & 255).to(torch.uint8)


def unpack_levels(codes: Tensor, bits: int) -> Tensor:
    """Return the levels that :func:`pack_levels` got, in the dtype of ``codes``: uint8, or wider."""
    if bits == 4:
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    x, y, z = torch.unflatten(codes, -1, (-1, 3)).unbind(-1)
    parts = (x & 63, (x >> 6 | y << 2) & 63, (y >> 4 | z << 4) & 63, z >> 2)
    return torch.stack(parts, dim=-1).flatten(-2)


def round_weight(weight: Tensor, how: Rounding, tries: int = TRIES) -> Rounded:
    """Round a matrix ``[out, in]`` of any floating dtype; nothing is random.

    ``tries``: cuts of a group's range that are compared; 1: none is cut, in a third of the time.
    """
    out, inputs = weight.shape
    if not how.group:
        levels, step = _by_row(weight.detach().float())
        return Rounded(how, (out, inputs), levels, step, None)
    rows = max(1, _AT_ONCE // inputs)
    parts = [_by_group(part.detach().float(), how, tries) for part in torch.split(weight, rows)]
    codes, step, offset = (torch.cat(each) for each in zip(*parts, strict=True))
    return Rounded(how, (out, inputs), codes, step, offset)


def _by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    step = torch.where(step > 0, step, 1.0)
    return (weight / step).round().clamp(-127, 127).to(torch.int8), step


def _add_up(x: Tensor) -> Tensor:
    """Add up ``x [..., n]``, n a power of two, by halves: in one order, so that all devices cut alike."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def _by_group(weight: Tensor, how: Rounding, tries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows by groups; of several cuts of a group's range the one with the least squared error."""
    groups = torch.unflatten(F.pad(weight, (0, -weight.shape[1] % how.group)), 1, (-1, how.group))
    most = 2**how.bits - 1
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    middle = (low + high) / 2
    least: Tensor | None = None
    for cut in range(tries):
        kept = 1 - _MOST_CUT * cut / (TRIES - 1)
        bottom, top = middle + (low - middle) * kept, middle + (high - middle) * kept
        step = ((top - bottom) / most).bfloat16()
        step = torch.where(step > 0, step, torch.ones_like(step))
        offset = bottom.bfloat16()
        s, o = step.float().unsqueeze(-1), offset.float().unsqueeze(-1)
        levels = ((groups - o) / s).round_().clamp_(0, most)
        error = _add_up((levels * s + o - groups).square_())
        made = levels.to(torch.uint8)
        if least is None:
            least, best, steps, offsets = error, made, step, offset
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better.unsqueeze(-1), made, best)
        steps, offsets = torch.where(better, step, steps), torch.where(better, offset, offsets)
    return pack_levels(best, how.bits), steps, offsets
