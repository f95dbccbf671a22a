"""Quantized weights in the native kernels' order, which ``native.h`` describes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.nn.rounding import Rounded, Rounding, pack_levels
from lantern_accel_cpu import pages
from lantern_accel_cpu.native.library import PANEL

#: How a weight is kept, by its bits, as the kernels have it.
KEPT = {8: 1, 6: 2, 4: 3}
#: Added for a copy that drafts: its products may round activations to 8 bits as well.
DRAFTS = 8
#: Inputs that share a step, as the kernels have it.
GROUP = 64
#: Weights that are put in order at a time, which takes several times their memory.
_AT_ONCE = 1 << 22


class RoundedPanels:
    """A quantized matrix ``[out, in]`` in panels of 32 rows: uint8 ``[panels, bytes]``."""

    def __init__(
        self, how: Rounding, shape: tuple[int, int], panels: Tensor, drafts: bool = False
    ) -> None:
        """``drafts``: of a copy whose products may round activations too."""
        self.rounding, self.shape, self.panels, self.drafts = how, shape, panels, drafts

    @classmethod
    def of(cls, weight: Rounded, drafts: bool = False) -> RoundedPanels:
        """Put a matrix in order; ``drafts``: of a copy whose products may round activations too."""
        made, at = cls.empty(weight.rounding, weight.shape, drafts), 0
        for part in _parts(weight):
            panels = _order_panels(part)
            made.panels[at : at + len(panels)] = panels
            at += len(panels)
        return made

    @classmethod
    def empty(cls, how: Rounding, shape: tuple[int, int], drafts: bool = False) -> RoundedPanels:
        """Return panels for a matrix of this shape, whose bytes are still to be written."""
        out, inputs = shape
        if how.group:
            size = -(-inputs // GROUP) * PANEL * (4 + GROUP * how.bits // 8)
        else:
            size = PANEL * (4 + -(-inputs // 4) * 4)
        panels = pages.zeros((-(-out // PANEL), size), torch.uint8)
        return cls(how, shape, panels, drafts)

    @property
    def address(self) -> int:
        """Where it lies, and how it is kept, as the kernels take it."""
        start = self.panels.data_ptr()
        assert start % 64 == 0, "torch aligns what it allocates to 64 bytes"
        return start + KEPT[self.rounding.bits] + DRAFTS * self.drafts

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.numel()

    def to_rounded(self) -> Rounded:
        """Return the matrix as it was before it was put in order."""
        (out, inputs), how, count = self.shape, self.rounding, len(self.panels)
        if not how.group:
            step = self.panels[:, : 4 * PANEL].contiguous().view(torch.float32).reshape(-1, 1)
            codes = self.panels[:, 4 * PANEL :].reshape(count, -1, PANEL, 4).transpose(1, 2)
            codes = codes.reshape(count * PANEL, -1)[:out, :inputs].contiguous().view(torch.int8)
            return Rounded(how, self.shape, codes, step[:out], None)
        groups = -(-inputs // GROUP)
        whole = self.panels.view(count, groups, -1)
        step, offset = (
            whole[..., at : at + 2 * PANEL].contiguous().view(torch.bfloat16).transpose(1, 2)
            for at in (0, 2 * PANEL)
        )
        lanes = whole[..., 4 * PANEL :].contiguous().view(torch.int32)
        lanes = lanes.view(count, groups, -1, PANEL).permute(0, 3, 1, 2)
        levels = _levels(lanes, how.bits).reshape(count * PANEL, groups, GROUP)[:out]
        step, offset = (t.reshape(count * PANEL, groups)[:out].contiguous() for t in (step, offset))
        return Rounded(how, self.shape, pack_levels(levels, how.bits), step, offset)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the codes stand for (:meth:`Rounded.dense`)."""
        return self.to_rounded().dense(dtype)


def _parts(weight: Rounded) -> Iterator[Rounded]:
    """Yield a matrix in pieces of whole panels."""
    out, inputs = weight.shape
    rows = max(1, _AT_ONCE // (inputs * PANEL)) * PANEL
    for at in range(0, out, rows):
        codes, step = weight.codes[at : at + rows], weight.step[at : at + rows]
        offset = None if weight.offset is None else weight.offset[at : at + rows]
        yield Rounded(weight.rounding, (len(codes), inputs), codes, step, offset)


def _whole_panels(t: Tensor) -> Tensor:
    """Add rows of zeros until a tensor ``[out, ...]`` has whole panels: ``[panels, 32, ...]``."""
    more = (0, 0) * (t.dim() - 1) + (0, -len(t) % PANEL)
    return torch.unflatten(F.pad(t, more), 0, (-1, PANEL))


def _order_panels(weight: Rounded) -> Tensor:
    """Return panels uint8 ``[panels, bytes]``."""
    levels = weight.levels()
    if weight.offset is None:
        codes = F.pad(levels, (0, -levels.shape[1] % 4))
        codes = torch.unflatten(_whole_panels(codes), 2, (-1, 4)).transpose(1, 2).contiguous()
        steps = _whole_panels(weight.step).contiguous()
        return torch.cat([t.flatten(1).view(torch.uint8) for t in (steps, codes)], dim=1)
    steps, offsets = (
        _whole_panels(t).transpose(1, 2).contiguous() for t in (weight.step, weight.offset)
    )
    lanes = (
        _lanes(_whole_panels(levels).int(), weight.rounding.bits).permute(0, 2, 3, 1).contiguous()
    )
    parts = [steps.view(torch.uint8), offsets.view(torch.uint8), lanes.flatten(2).view(torch.uint8)]
    return torch.cat(parts, dim=-1).flatten(1)


def _places(count: int, wide: int) -> Tensor:
    """Return where each of ``count`` inputs lies in a lane: even ones low, odd ones in the upper half."""
    at = torch.arange(count)
    return (wide * (at // 2) + 16 * (at % 2)).int()


def _upper_places() -> Tensor:
    """Return where the upper bits of 16 inputs lie in a lane: in the bytes of their lower bits."""
    at = torch.arange(16)
    pair = at // 2
    return (pair % 2 * 2 + pair // 2 % 2 * 8 + pair // 4 * 4 + 16 * (at % 2)).int()


def _lanes(levels: Tensor, bits: int) -> Tensor:
    """Return levels int32 ``[..., 64]`` in lanes of 32 bits, int32 ``[..., 8 or 12]``."""
    low = torch.unflatten(levels, -1, (-1, 8)) & 15
    lanes = (low << _places(8, 4)).sum(dim=-1, dtype=torch.int32)
    if bits == 4:
        return lanes
    high = torch.unflatten(levels, -1, (-1, 16)) >> 4
    upper = (high << _upper_places()).sum(dim=-1, dtype=torch.int32)
    return torch.cat((torch.unflatten(lanes, -1, (-1, 2)), upper.unsqueeze(-1)), dim=-1).flatten(-2)


def _levels(lanes: Tensor, bits: int) -> Tensor:
    """Return the levels that :func:`_lanes` was given, uint8."""
    if bits == 4:
        return (lanes.unsqueeze(-1) >> _places(8, 4) & 15).to(torch.uint8).flatten(-2)
    parts = torch.unflatten(lanes, -1, (-1, 3))
    low = (parts[..., :2].unsqueeze(-1) >> _places(8, 4) & 15).flatten(-2)
    high = parts[..., 2:] >> _upper_places() & 3
    return (low | high << 4).to(torch.uint8).flatten(-2)
