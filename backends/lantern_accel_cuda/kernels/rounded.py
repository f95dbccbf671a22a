"""Multiplies up to 16 rows by quantized weights, whose codes become numbers in registers.

Codes lie with the outputs side by side, so that a program reads whole lines, and the codes of a group in
planes: a byte of 4 bits holds inputs ``i`` and ``i + 32``, and one of the upper 2 of 6 bits holds ``i``,
``i + 16``, ``i + 32`` and ``i + 48``. So a plane's product is a plain one, and nothing is shuffled.

Codes are integers below 128, which bfloat16 holds exactly: they are multiplied as they are, and
steps and offsets are applied to the sums, an offset to the sum of the group's activations. Sums are
float32. Where a matrix has too few outputs to fill the card, its inputs are shared among programs too;
what these find is added in one order, so that equal rows give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.nn.rounding import Rounded, Rounding, pack_levels
from lantern_accel_cuda.kernels import tiles
from lantern_accel_cuda.kernels.operators import operator

#: Rows above which a matrix is made dense once: then products cost more than reading does.
MOST_ROWS = 128
GROUP = 64
#: Outputs of a program here, its rows, warps and stages. More rows are :mod:`.tiles`' where that serves.
OUTPUTS, ROWS, WARPS, STAGES = 64, 16, 4, 3
#: Programs for each multiprocessor, where inputs can be shared among this many; groups of each, at least.
PROGRAMS, LEAST_GROUPS = 2, 4


@dataclass(frozen=True, eq=False)
class Columns:
    """A quantized matrix ``[out, in]`` in the kernels' order; ``padded`` outputs, a multiple of 16.

    ``codes``: int8 ``[in, padded]`` with a step a row, else uint8 ``[groups * bytes, padded]``.
    ``step``: float32 ``[1, padded]``, or bfloat16 ``[groups, padded]`` as ``offset``.
    """

    rounding: Rounding
    shape: tuple[int, int]
    codes: Tensor
    step: Tensor
    offset: Tensor | None

    @classmethod
    def of(cls, weight: Rounded) -> Columns:
        """Put a matrix in order, on its own device."""
        how, spare = weight.rounding, -weight.shape[0] % 16
        if weight.offset is None:
            codes, step, offset = weight.codes, weight.step, None
        else:
            codes = _planes(weight.levels(), how.bits).flatten(1)
            step, offset = weight.step, _transpose(weight.offset, spare)
        return cls(how, weight.shape, _transpose(codes, spare), _transpose(step, spare), offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        parts = (self.codes, self.step, *(() if self.offset is None else (self.offset,)))
        return sum(t.numel() * t.element_size() for t in parts)

    def to_rounded(self) -> Rounded:
        """Return the matrix as it was before it was put in order."""
        out, inputs = self.shape
        codes, step = (t[:, :out].t().contiguous() for t in (self.codes, self.step))
        if self.offset is None:
            return Rounded(self.rounding, self.shape, codes, step, None)
        groups = -(-inputs // GROUP)
        levels = _levels(codes.unflatten(1, (groups, -1)), self.rounding.bits)
        offset = self.offset[:, :out].t().contiguous()
        return Rounded(
            self.rounding, self.shape, pack_levels(levels, self.rounding.bits), step, offset
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights that the codes stand for (:meth:`.Rounded.dense`)."""
        return self.to_rounded().dense(dtype)


def _transpose(t: Tensor, spare: int) -> Tensor:
    """Return ``[n, out + spare]`` of a tensor ``[out, n]``."""
    return F.pad(t.t(), (0, spare)).contiguous()


def _planes(levels: Tensor, bits: int) -> Tensor:
    """Return levels, uint8 ``[..., 64]``, in planes of bytes ``[..., 32 or 48]``."""
    first, second = (levels & 15).unflatten(-1, (2, 32)).unbind(-2)
    low: Tensor = first | second << 4
    if bits == 4:
        return low
    a, b, c, d = (levels >> 4).unflatten(-1, (4, 16)).unbind(-2)
    return torch.cat((low, a | b << 2 | c << 4 | d << 6), dim=-1)


def _levels(planes: Tensor, bits: int) -> Tensor:
    """Return the levels that :func:`_planes` was given."""
    low: Tensor = torch.cat((planes[..., :32] & 15, planes[..., :32] >> 4), dim=-1)
    if bits == 4:
        return low
    upper = planes[..., 32:]
    two = torch.cat([upper >> at & 3 for at in (0, 2, 4, 6)], dim=-1)
    return low.bitwise_or(two << 4)


@triton.jit
def _inputs(x, m, k, rows, ld, inputs):
    """Return activations of rows ``m`` and inputs ``k``; 0 behind the last of either."""
    inside = (m < rows)[:, None] & (k < inputs)[None, :]
    return tl.load(x + m[:, None].to(tl.int64) * ld + k[None, :], mask=inside, other=0.0)


@triton.jit
def _bytes(codes, first, n, ld, COUNT: tl.constexpr):
    """Return ``COUNT`` lines of bytes from ``first`` on, of outputs ``n``."""
    line = first + tl.arange(0, COUNT)
    return tl.load(
        codes + line[:, None].to(tl.int64) * ld + n[None, :], mask=(n < ld)[None, :], other=0
    )


@triton.jit(do_not_specialize=["rows", "share"])
def _product(
    x, codes, step, offset, bias, out, rows, ld_x, inputs, outputs, ld, share,
    BITS: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    piece = tl.program_id(1)
    groups = (inputs + 63) // 64
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(piece * share, tl.minimum(piece * share + share, groups)):
        k = group * 64
        if BITS == 8:
            line = k + tl.arange(0, 64)
            inside = (line < inputs)[:, None] & (n < ld)[None, :]
            w = tl.load(codes + line[:, None].to(tl.int64) * ld + n[None, :], mask=inside, other=0)
            a = _inputs(x, m, line, rows, ld_x, inputs)
            acc = tl.dot(a, w.to(a.dtype), acc, input_precision="ieee")
        else:
            if BITS == 4:
                both = _bytes(codes, group * 32, n, ld, 32)
                at = k + tl.arange(0, 32)
                a = _inputs(x, m, at, rows, ld_x, inputs)
                b = _inputs(x, m, at + 32, rows, ld_x, inputs)
                part = tl.dot(a, (both & 15).to(a.dtype), input_precision="ieee")
                part = tl.dot(b, (both >> 4).to(a.dtype), part, input_precision="ieee")
                total = tl.sum(a.to(tl.float32), 1) + tl.sum(b.to(tl.float32), 1)
            else:
                first = _bytes(codes, group * 48, n, ld, 16)
                second = _bytes(codes, group * 48 + 16, n, ld, 16)
                upper = _bytes(codes, group * 48 + 32, n, ld, 16)
                at = k + tl.arange(0, 16)
                a = _inputs(x, m, at, rows, ld_x, inputs)
                b = _inputs(x, m, at + 16, rows, ld_x, inputs)
                c = _inputs(x, m, at + 32, rows, ld_x, inputs)
                d = _inputs(x, m, at + 48, rows, ld_x, inputs)
                w = (first & 15) | ((upper & 3) << 4)
                part = tl.dot(a, w.to(a.dtype), input_precision="ieee")
                w = (second & 15) | ((upper & 12) << 2)
                part = tl.dot(b, w.to(a.dtype), part, input_precision="ieee")
                w = (first >> 4) | (upper & 48)
                part = tl.dot(c, w.to(a.dtype), part, input_precision="ieee")
                w = (second >> 4) | ((upper & 192) >> 2)
                part = tl.dot(d, w.to(a.dtype), part, input_precision="ieee")
                total = tl.sum(a.to(tl.float32), 1) + tl.sum(b.to(tl.float32), 1)
                total += tl.sum(c.to(tl.float32), 1) + tl.sum(d.to(tl.float32), 1)
            s = tl.load(step + group * ld + n, mask=n < ld, other=0.0).to(tl.float32)
            o = tl.load(offset + group * ld + n, mask=n < ld, other=0.0).to(tl.float32)
            acc += part * s[None, :] + total[:, None] * o[None, :]
    if BITS == 8:
        acc = acc * tl.load(step + n, mask=n < ld, other=0.0)[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    if WHOLE:
        if BIAS:
            acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        place = m[:, None].to(tl.int64) * outputs + n[None, :]
    else:
        place = (piece.to(tl.int64) * rows + m[:, None]) * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _together(parts, bias, out, count, size, outputs, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for piece in range(count):
        total += tl.load(parts + piece * size + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def pieces_of(inputs: int, outputs: int, cores: int) -> int:
    """Return among how many programs the inputs of a matrix are shared, on a card of ``cores``.

    A row's result depends on it, so that the number of rows does not count.
    """
    blocks, groups = -(-outputs // OUTPUTS), -(-inputs // GROUP)
    return max(1, min(-(-PROGRAMS * cores // blocks), groups // LEAST_GROUPS))


def _fake_product(
    x: Tensor, codes: Tensor, step: Tensor, offset: Tensor | None, bias: Tensor | None,
    bits: int, outputs: int, cores: int, sums: bool, tiled: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], outputs), dtype=torch.float32 if sums else x.dtype)


@operator(
    "rounded_product(Tensor x, Tensor codes, Tensor step, Tensor? offset, Tensor? bias, int bits,"
    " int outputs, int cores, bool sums, bool tiled) -> Tensor",
    _fake_product,
)
def product(
    x: Tensor, codes: Tensor, step: Tensor, offset: Tensor | None, bias: Tensor | None,
    bits: int, outputs: int, cores: int, sums: bool, tiled: bool,
) -> Tensor:  # fmt: skip
    """Multiply as :func:`multiply`, by the tensors of a matrix."""
    inputs = x.shape[-1]
    flat = x.reshape(-1, inputs).contiguous()
    rows, ld = len(flat), codes.shape[1]
    out = _fake_product(x, codes, step, offset, bias, bits, outputs, cores, sums, tiled)
    groups = triton.cdiv(inputs, GROUP)
    share = triton.cdiv(groups, pieces_of(inputs, outputs, cores))
    pieces = triton.cdiv(groups, share)
    if tiled and rows > ROWS and x.dtype in tiles.DTYPES:
        tiles.launch(flat, codes, step, offset, bias, out, bits, outputs, pieces, share)
        return out
    whole = pieces == 1
    found = out if whole else x.new_empty(pieces, rows, outputs, dtype=torch.float32)
    grid = (triton.cdiv(outputs, OUTPUTS), pieces, triton.cdiv(rows, ROWS))
    added = out if bias is None else bias
    with torch.cuda.device_of(x):
        _product[grid](
            flat, codes, step, step if offset is None else offset, added, found,
            rows, flat.stride(0), inputs, outputs, ld, share,
            BITS=bits, BIAS=bias is not None, WHOLE=whole, BLOCK_M=ROWS, BLOCK_N=OUTPUTS,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        if not whole:
            size = rows * outputs
            _together[(triton.cdiv(size, 1024),)](
                found, added, out, pieces, size, outputs,
                BIAS=bias is not None, BLOCK=1024, num_warps=4,
            )  # fmt: skip
    return out


def multiply(
    x: Tensor,
    weight: Columns,
    bias: Tensor | None,
    cores: int,
    sums: bool = False,
    tiled: bool = True,
) -> Tensor:
    """Multiply ``x [..., in]`` by a quantized matrix: ``[..., out]``, on a card of ``cores``.

    ``sums``: return them in float32, as they are. ``tiled``: more than :data:`ROWS` rows in 16 bits may
    take :mod:`.tiles`. More than :data:`MOST_ROWS` rows take the matrix made dense, whose sums are
    rounded.
    """
    if x.numel() // x.shape[-1] > MOST_ROWS:
        out: Tensor = F.linear(x, weight.dense(x.dtype), bias)
        return out.float() if sums else out
    return product(
        x, weight.codes, weight.step, weight.offset, bias, weight.rounding.bits, weight.shape[0],
        cores, sums, tiled,
    )  # fmt: skip
