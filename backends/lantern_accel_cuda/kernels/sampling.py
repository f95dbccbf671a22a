"""From logits to distributions and draws, as one Triton kernel each.

The k-th value and the place where top-p cuts are found by halving ranges of the numbers' bits, so that
no row is sorted. Which codes stay and which are sampled is the reference's, but where rounding decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel.device.plan import Filter
from lantern_accel_cuda.kernels import rows
from lantern_accel_cuda.kernels.operators import operator
from lantern_accel_cuda.kernels.rows import (
    LOWEST,
    mass_above,
    pick,
    rank,
    scale_logits,
    top_k_bar,
    top_p_bar,
)

#: Draws without replacement that a program remembers.
MAX_SAMPLES = 64
#: Codes that a draw takes at once: each is compared with all draws before.
SAMPLE_BLOCK = 512


@triton.jit(do_not_specialize=["count"])
def _guide(
    logits, token, scale, image_scale, kind, penalty, out,
    count, branch,
    SIZE: tl.constexpr, BRANCHES: tl.constexpr, PENALTIES: tl.constexpr, WHOLE: tl.constexpr,
    HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    number = tl.load(token + (row // count if WHOLE else row))
    place = logits + row * SIZE + at
    y = tl.load(place, mask=inside, other=0.0)
    if BRANCHES > 1:
        s = tl.load(scale + number)
        last = tl.load(place + (BRANCHES - 1) * branch, mask=inside, other=0.0)
        if BRANCHES == 2:
            mixed = last + s * (y - last)
        else:
            t = tl.load(image_scale) if HELD else image_scale
            image = tl.load(place + branch, mask=inside, other=0.0)
            mixed = last + t * (image - last) + s * (y - image)
        y = tl.where(s > 1, mixed, y)
    if PENALTIES:
        which = tl.load(kind + number).to(tl.int64)
        y += tl.load(penalty + which * SIZE + at, mask=inside, other=0.0)
    tl.store(out + row * SIZE + at, y, mask=inside)


@triton.jit(do_not_specialize=["k"])
def _filter(
    logits, temperature, top_p, out, k,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, P_FIRST: tl.constexpr,
    HELD_T: tl.constexpr, HELD_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * SIZE
    out += row * SIZE
    t = tl.load(temperature) if HELD_T else temperature
    p = tl.load(top_p) if HELD_P else top_p
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, SIZE, BLOCK):
        _, x = scale_logits(logits, start, t, SIZE, BLOCK)
        broken += (x != x).to(tl.int32)
        largest = tl.maximum(largest, x)
    most = tl.max(largest, 0)
    # A row with a NaN, with +inf or without a finite number gives NaN, as softmax does.
    bad = (tl.sum(broken, 0) > 0) | (most == float("inf")) | (most == float("-inf"))
    most = tl.where(bad, 0.0, most)
    least = tl.full([], float("-inf"), tl.float32)
    cut = tl.full([], float("-inf"), tl.float32)
    above = tl.full([], 0.0, tl.float32)
    each = tl.full([], 0.0, tl.float32)
    if TOP_K and not P_FIRST:
        low = tl.full([], LOWEST, tl.int64)
        least = top_k_bar(logits, t, k, low, most, SIZE, BLOCK)
    if TOP_P:
        whole = mass_above(logits, t, float("-inf"), least, most, SIZE, BLOCK)
        cut = top_p_bar(logits, t, p, least, most, whole, SIZE, BLOCK)
        above = tl.div_rn(mass_above(logits, t, cut, least, most, SIZE, BLOCK), whole)
        each = tl.div_rn(tl.exp(cut - most), whole)
    if TOP_K and P_FIRST:
        least = top_k_bar(logits, t, k, rank(cut).to(tl.int64), most, SIZE, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, SIZE, BLOCK):
        at, x = scale_logits(logits, start, t, SIZE, BLOCK)
        stays = x >= least
        if TOP_P:
            # Of codes that equal the last value some stay, in order, while the sum is below p.
            equal = (x == cut) & (at < SIZE)
            before = seen + tl.cumsum(equal.to(tl.int32), 0) - 1
            stays &= (x > cut) | (equal & (above + before.to(tl.float32) * each <= p))
            seen += tl.sum(equal.to(tl.int32), 0)
        mass += tl.where(stays, tl.exp(x - most), 0.0)
    total = tl.where(bad, float("nan"), tl.sum(mass, 0))
    seen = tl.full([], 0, tl.int32)
    for start in range(0, SIZE, BLOCK):
        at, x = scale_logits(logits, start, t, SIZE, BLOCK)
        stays = x >= least
        if TOP_P:
            equal = (x == cut) & (at < SIZE)
            before = seen + tl.cumsum(equal.to(tl.int32), 0) - 1
            stays &= (x > cut) | (equal & (above + before.to(tl.float32) * each <= p))
            seen += tl.sum(equal.to(tl.int32), 0)
        y = tl.div_rn(tl.where(stays, tl.exp(x - most), 0.0), total)
        tl.store(out + at, y, mask=at < SIZE)


@triton.jit(do_not_specialize=["count", "groups", "image_stride", "group_stride", "stride"])
def _sample_kernel(
    weights, uniforms, out, count, groups, image_stride, group_stride, stride,
    SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    order = tl.arange(0, COUNT)
    uniforms += (row // groups) * image_stride + (row % groups) * group_stride
    gone = tl.full([COUNT], -1, tl.int32)
    for r in range(count):
        u = tl.load(uniforms + r * stride)
        code = pick(weights + row * SIZE, u, gone, SIZE, BLOCK)
        gone = tl.where(order == r, code, gone)
    tl.store(out + row * count + order, gone.to(out.dtype.element_ty), mask=order < count)


@operator(
    "guide(Tensor logits, Tensor token, Tensor? scale, Tensor? image_scale, float image, Tensor? kind,"
    " Tensor? penalty, int branches) -> Tensor",
    lambda logits, *rest: logits.new_empty(logits.shape[0] // rest[-1], *logits.shape[1:]),
)
def _launch_guide(
    logits: Tensor,
    token: Tensor,
    scale: Tensor | None,
    image_scale: Tensor | None,
    image: float,
    kind: Tensor | None,
    penalty: Tensor | None,
    branches: int,
) -> Tensor:
    logits, token = logits.contiguous(), token.contiguous()
    size, count = logits.shape[-1], logits.shape[1]
    images = logits.shape[0] // branches
    out = logits.new_empty(images, count, size)
    block = min(1024, triton.next_power_of_2(size))
    with torch.cuda.device_of(logits):
        _guide[(images * count, triton.cdiv(size, block))](
            logits, token, token if scale is None else scale,
            image if image_scale is None else image_scale,
            token if kind is None else kind, logits if penalty is None else penalty, out,
            count, images * count * size,
            SIZE=size, BRANCHES=branches, PENALTIES=penalty is not None, WHOLE=token.dim() == 1,
            HELD=image_scale is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@operator(
    "filter(Tensor logits, Tensor? temperature, float t, int top_k, Tensor? top_p, float p,"
    " bool cut, bool p_first) -> Tensor",
    lambda logits, *rest: torch.empty_like(logits.contiguous()),
)
def _launch_filter(
    logits: Tensor,
    temperature: Tensor | None,
    t: float,
    top_k: int,
    top_p: Tensor | None,
    p: float,
    cut: bool,
    p_first: bool,
) -> Tensor:
    logits = logits.contiguous()
    size = logits.shape[-1]
    out = torch.empty_like(logits)
    here = logits.device
    warp = torch.cuda.get_device_properties(here).warp_size if here.type == "cuda" else 32
    block, warps = rows.filter_shape(size, cut, warp)
    with torch.cuda.device_of(logits):
        _filter[(logits.numel() // size,)](
            logits, t if temperature is None else temperature, p if top_p is None else top_p, out,
            top_k,
            SIZE=size, TOP_K=0 < top_k < size, TOP_P=cut, P_FIRST=p_first and cut,
            HELD_T=temperature is not None, HELD_P=top_p is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out


@operator(
    "draw(Tensor weights, Tensor uniforms, ScalarType index) -> Tensor",
    lambda weights, u, index: u.new_empty(u.shape, dtype=index),
)
def _launch_sample(weights: Tensor, uniforms: Tensor, index: torch.dtype) -> Tensor:
    weights, size, count = weights.contiguous(), weights.shape[-1], uniforms.shape[-1]
    out = torch.empty(uniforms.shape, dtype=index, device=weights.device)
    # Images, groups and draws keep their strides: uniforms are a piece of a step's.
    u = uniforms[(None,) * (3 - uniforms.dim())] if uniforms.dim() < 3 else uniforms.flatten(0, -3)
    with torch.cuda.device_of(weights):
        _sample_kernel[(u.shape[0] * u.shape[1],)](
            weights, u, out, count, u.shape[1], u.stride(0), u.stride(1), u.stride(2),
            SIZE=size, COUNT=triton.next_power_of_2(count), BLOCK=min(rows.block_of(size), SAMPLE_BLOCK),
            num_warps=4,
        )  # fmt: skip
    return out


def _apart(value: Tensor | float | None) -> tuple[Tensor | None, float]:
    """Return a number as what an operator takes: a tensor, or else a float."""
    if isinstance(value, Tensor):
        return value, 0.0
    return None, 0.0 if value is None else float(value)


def plain(*tensors: Tensor | float | None) -> bool:
    """Return whether what is a tensor is float32 and not empty."""
    return all(t.dtype == torch.float32 and t.numel() > 0 for t in tensors if isinstance(t, Tensor))


def guide(
    logits: Tensor,
    token: Tensor,
    scale: Tensor | None,
    image_scale: Tensor | float | None,
    penalties: tuple[Tensor, Tensor] | None,
) -> Tensor | None:
    """Return guided logits ``[B, T, V]`` (:meth:`SamplingOps.guide`); None: not served."""
    kind, penalty = penalties if penalties is not None else (None, None)
    if not plain(logits, scale, image_scale, penalty):
        return None
    branches = 1 if scale is None else 2 if image_scale is None else 3
    if branches == 1 and penalty is None:
        return logits
    if logits.shape[0] != branches * len(token):
        return None
    if penalty is not None:
        penalty = penalty.contiguous()
    held, image = _apart(image_scale)
    return _launch_guide(logits, token, scale, held, image, kind, penalty, branches)


def filter(logits: Tensor, given: Filter) -> Tensor | None:
    """Return the probabilities ``[..., V]`` that a filter makes of logits; None: not served."""
    if not plain(logits, given.temperature, given.top_p):
        return None
    temperature, t = _apart(given.temperature)
    top_p, p = _apart(given.top_p)
    cut = given.top_p is not None
    return _launch_filter(logits, temperature, t, given.top_k, top_p, p, cut, given.p_first)


def sample_codes(weights: Tensor, uniforms: Tensor, index: torch.dtype) -> Tensor | None:
    """Sample codes ``[..., K]`` without replacement from ``[..., V]`` with uniforms ``[..., K]``.

    ``index``: the dtype of codes. None where there is no kernel for it.
    """
    if not plain(weights, uniforms) or weights.shape[:-1] != uniforms.shape[:-1]:
        return None
    if uniforms.shape[-1] > MAX_SAMPLES:
        return None
    return _launch_sample(weights, uniforms, index)
