"""The race by position-keyed noise, over many thread blocks: Threefry, exponential numbers, the largest.

One program makes the noise of a piece of a row in its registers and keeps the first few of ``weight /
noise``; a second kernel joins the pieces of a row. The bits are those of
:mod:`lantern_accel.device.noise`: no multiplication is contracted with an addition, and of equal codes
the lower one wins, in whichever order pieces are done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel.device.noise import LN2, PARITY, SERIES
from lantern_accel_cuda.kernels.operators import operator

#: Codes that a program takes, its warps, and the most siblings that it keeps.
PIECE = 1024
WARPS = 4
MOST_SIBLINGS = 32

_PARITY = tl.constexpr(PARITY)
_LN2 = tl.constexpr(LN2)
_S0, _S1, _S2, _S3 = (tl.constexpr(term) for term in SERIES[:4])
_S4, _S5, _S6 = (tl.constexpr(term) for term in SERIES[4:])
#: Below every score; of codes that are behind the row's end, or taken.
_NONE = tl.constexpr(-1.0)


@triton.jit
def _mix(x0, x1, BY: tl.constexpr):
    x0 = x0 + x1
    x1 = (x1 << BY) | (x1 >> (32 - BY))
    return x0, x1 ^ x0


@triton.jit
def _four(x0, x1, key_a, key_b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0, x1 = _mix(x0, x1, A)
    x0, x1 = _mix(x0, x1, B)
    x0, x1 = _mix(x0, x1, C)
    x0, x1 = _mix(x0, x1, D)
    return x0 + key_a, x1 + key_b


@triton.jit
def threefry(key0, key1, x0, x1):
    """Return the two words of Threefry-2x32 with 20 rounds, uint32."""
    key2 = key0 ^ key1 ^ _PARITY
    x0, x1 = x0 + key0, x1 + key1
    x0, x1 = _four(x0, x1, key1, key2 + 1, 13, 15, 26, 6)
    x0, x1 = _four(x0, x1, key2, key0 + 2, 17, 29, 16, 24)
    x0, x1 = _four(x0, x1, key0, key1 + 3, 13, 15, 26, 6)
    x0, x1 = _four(x0, x1, key1, key2 + 4, 17, 29, 16, 24)
    return _four(x0, x1, key2, key0 + 5, 13, 15, 26, 6)


@triton.jit
def exponential_of(words):
    """Return standard exponential numbers of random uint32 words, as the reference has them."""
    signed = words.to(tl.int32, bitcast=True)
    upper = signed < 0
    small = (signed ^ (signed >> 31)).to(tl.float32) + 0.5
    bits = small.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    share = small * 2.3283064365386963e-10
    above = tl.where(upper, share, 1.0 - mantissa)
    below = tl.where(upper, 2.0 - share, 1.0 + mantissa)
    halvings = tl.where(upper, 0, 32 - exponent).to(tl.float32)
    t = tl.div_rn(above, below)
    z = t * t
    series = z * _S6 + _S5
    series = series * z + _S4
    series = series * z + _S3
    series = series * z + _S2
    series = series * z + _S1
    series = series * z + _S0
    return halvings * _LN2 + (t + t) * series


@triton.jit
def score_of(w, at, noise, SIZE: tl.constexpr):
    """Return what codes ``at`` score with weights ``w``; below every score behind the row's end."""
    score = tl.div_rn(w, noise)
    # A row that is not a number gives the first such code, as the reference does.
    score = tl.where(score == score, score, float("inf"))
    return tl.where(at < SIZE, score, _NONE)


@triton.jit
def _scores(weights, at, noise, SIZE: tl.constexpr):
    return score_of(tl.load(weights + at, mask=at < SIZE, other=0.0), at, noise, SIZE)


@triton.jit(do_not_specialize=["count", "pieces"])
def _race_pieces(
    weights, keys, positions, best, codes, count, pieces,
    SIZE: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    image = row // count
    key0 = tl.load(keys + 3 * image).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 3 * image + 1).to(tl.uint32, bitcast=True)
    number = tl.load(keys + 3 * image + 2).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row).to(tl.int32).to(tl.uint32, bitcast=True)
    half = piece * HALF + tl.arange(0, HALF)
    counter = (position << 16) | half.to(tl.uint32, bitcast=True)
    even, odd = threefry(key0, key1, counter, tl.zeros([HALF], tl.uint32) + number)
    weights += row * SIZE
    first = _scores(weights, 2 * half, exponential_of(even), SIZE)
    second = _scores(weights, 2 * half + 1, exponential_of(odd), SIZE)
    place = (row * pieces + piece) * COUNT
    for r in tl.static_range(COUNT):
        high = tl.max(tl.maximum(first, second), 0)
        lower = tl.where(second == high, 2 * half + 1, 2 * SIZE + 1)
        lower = tl.where(first == high, 2 * half, lower)
        code = tl.min(lower, 0)
        tl.store(best + place + r, high)
        tl.store(codes + place + r, code)
        first = tl.where(2 * half == code, _NONE, first)
        second = tl.where(2 * half + 1 == code, _NONE, second)


@triton.jit(do_not_specialize=["found"])
def _race_join(
    best, codes, out, found, SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    score = tl.load(best + row * found + at, mask=at < found, other=_NONE - 1.0)
    code = tl.load(codes + row * found + at, mask=at < found, other=2 * SIZE + 1)
    for r in tl.static_range(COUNT):
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, code, 2 * SIZE + 1), 0)
        tl.store(out + row * COUNT + r, tl.minimum(first, SIZE - 1).to(out.dtype.element_ty))
        score = tl.where(code == first, _NONE - 1.0, score)


@operator(
    "race(Tensor weights, Tensor keys, Tensor positions, int count, ScalarType index) -> Tensor",
    lambda weights, keys, positions, count, index: weights.new_empty(
        (*weights.shape[:-1], count), dtype=index
    ),
)
def _launch_race(
    weights: Tensor, keys: Tensor, positions: Tensor, count: int, index: torch.dtype
) -> Tensor:
    weights, keys = weights.contiguous(), keys.contiguous()
    positions = positions.contiguous()
    images, nodes, size = weights.shape
    rows, half = images * nodes, min(PIECE, triton.next_power_of_2(max(size, 2))) // 2
    pieces = triton.cdiv(size, 2 * half)
    best = torch.empty(rows, pieces * count, dtype=torch.float32, device=weights.device)
    codes = torch.empty(rows, pieces * count, dtype=torch.int32, device=weights.device)
    out = torch.empty(images, nodes, count, dtype=index, device=weights.device)
    with torch.cuda.device_of(weights):
        _race_pieces[(rows, pieces)](
            weights, keys, positions, best, codes, nodes, pieces,
            SIZE=size, COUNT=count, HALF=half, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        _race_join[(rows,)](
            best, codes, out, pieces * count,
            SIZE=size, COUNT=count, BLOCK=triton.next_power_of_2(pieces * count), num_warps=1,
        )  # fmt: skip
    return out


def race(
    weights: Tensor, keys: Tensor, positions: Tensor, count: int, index: torch.dtype
) -> Tensor | None:
    """Sample the race's first ``count`` codes ``[B, T, count]`` (:meth:`SamplingOps.race`).

    ``index``: the dtype of codes. None where there is no kernel for it.
    """
    if weights.dtype != torch.float32 or weights.dim() != 3 or not weights.numel():
        return None
    if not 0 < count <= min(MOST_SIBLINGS, weights.shape[-1]) or keys.dtype != torch.int32:
        return None
    if positions.shape != weights.shape[:-1] or len(keys) != len(weights):
        return None
    return _launch_race(weights, keys, positions, count, index)
