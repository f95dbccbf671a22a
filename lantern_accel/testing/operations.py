"""Matmuls, norms and gates against float64 on the host, at sizes of published models and at odd ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.backend import Backend
from lantern_accel.device.packed import Weight, dense
from lantern_accel.nn.rounding import ROUNDINGS, round_weight
from lantern_accel.testing.result import (
    Compared,
    Failed,
    Measured,
    compare,
    doing,
    left_to_reference,
)
from lantern_accel.testing.tiny import normal
from lantern_accel.testing.tolerances import FLOAT32, MARGIN, SMALLEST, product, roundoff, short

#: Inputs and outputs of matrices: of LlamaGen's B, XL and 3B, of 7B models (few outputs), and odd ones.
MATRICES = ((768, 2304), (1280, 200), (3200, 72), (4096, 64), (257, 33), (100, 37))
#: A head of 16,384 codes, and an odd one.
HEADS = ((768, 16384), (100, 4097))
#: Rows of a matmul: a prompt's, a window's, a tree's, with guidance and without.
ROWS = (1, 2, 5, 16, 33, 64)
MOST = max(ROWS)


def _inputs(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return rows whose first and last numbers weigh most: a matmul that drops an end shows it."""
    x = normal(seed, rows, width)
    x[:, 0] += 8.0
    x[:, -1] -= 8.0
    return x.to(dtype)


def _parts(x: Tensor) -> list[tuple[slice, Tensor]]:
    """Return what a matmul is called with, rows of ``x [MOST, n]``: many and few, with leading axes.

    Two calls of one shape have other numbers: a result that is kept from the call before shows.
    """
    found = []
    for rows in (*(slice(0, n) for n in ROWS), *(slice(MOST - n, MOST) for n in ROWS[:3])):
        part = x[rows]
        count = len(part)
        found.append((rows, part.view(2, count // 2, -1) if count > 4 and not count % 2 else part))
    return found


def _mistakes(
    want: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return products that are often got wrong: of rows ``x``, ``want`` being right; as ``shape``."""
    found = {
        "the last input is left out": want - x[:, -1:] * weight[:, -1],
        "rows stand one place too far": want.roll(1, 0),
        "outputs stand one place too far": want.roll(1, 1),
        "the last row is not computed": torch.cat((want[:-1], torch.zeros_like(want[-1:]))),
    }
    if bias is not None:
        found["the bias is left out"] = want - bias
        found["the bias is added twice"] = want + bias
    return {name: value.view(shape) for name, value in found.items()}


def _compare_product(
    checked: Compared, packed: Weight, weight: Tensor, x: Tensor, bias: Tensor | None, what: str,
    *, sums: bool = False, drafts: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compare the product of ``x [..., in]`` and a packed matrix; return the right one and its bound.

    ``weight``: what the matrix stands for, float64 ``[out, in]``. ``sums``: the result is float32.
    ``drafts``: activations may be in eight bits.
    """
    wide, shape = x.double().flatten(0, -2), (*x.shape[:-1], len(weight))
    want = wide @ weight.t()
    added = None if bias is None else bias.double()
    near = product(wide, weight, want.abs() + (0.0 if added is None else added.abs()), x.dtype)
    if drafts:  # half a step of each activation, of random signs
        step = wide.abs().amax(1, keepdim=True) / 127
        near = near + MARGIN * step * weight.square().sum(1).sqrt() / 2
    if added is not None:
        want = want + added
    device = checked.backend.device
    got = checked.backend.linear(
        x.to(device), packed, None if bias is None else bias.to(device), **{"sums": True} if sums else {}
    )  # fmt: skip
    causes = partial(_mistakes, want, wide, weight, added, shape)
    want, near = want.view(shape), near.view(shape)
    checked.hold(got, want, near, what, torch.float32 if sums else x.dtype, causes)
    return want, near


def linear(backend: Backend) -> Measured:
    """Compare matmuls of packed matrices, with a bias and a residual, and what they are dense."""
    checked, device = Compared(backend, "linear", "linear_add", "pack"), backend.device
    for dtype, (inputs, outputs) in itertools.product(checked.dtypes, MATRICES):
        what = f"of {inputs} inputs and {outputs} outputs in {short(dtype)}"
        doing(what)
        given = (normal(outputs, outputs, inputs) * inputs**-0.5).to(dtype)
        packed = backend.pack(given.to(device))
        weight = given.double()
        # Within a dtype's rounding of the row's largest weight.
        near = roundoff(weight.abs().amax(1, keepdim=True), dtype)
        compare(dense(packed), weight, near, f"a packed matrix, dense, {what}")
        x = _inputs(inputs, MOST, inputs, dtype)
        bias, residual = normal(3, outputs).to(dtype), normal(4, MOST, outputs).to(dtype)
        for number, (rows, part) in enumerate(_parts(x)):
            one = bias if number % 2 else None
            shown = f"{what}, {rows.stop - rows.start} rows"
            want, near = _compare_product(checked, packed, weight, part, one, f"linear {shown}")
            before = residual[rows].view(want.shape)
            kept, wide = before.to(device, copy=True), before.double()
            got = backend.linear_add(
                part.to(device), packed, kept, None if one is None else one.to(device)
            )
            wrong = {
                "the residual is left out": want,
                "the product is taken off": wide - want,
                "the residual is added twice": 2 * wide + want,
            }
            shown = f"linear_add {shown}"
            checked.hold(got, wide + want, near + roundoff(wide, dtype), shown, dtype, wrong)
            if not backend.preferences.sums_in_place and not torch.equal(kept.cpu(), before):
                raise Failed(
                    f"{shown}: the residual was written over, and the "
                    "backend does not say sums_in_place"
                )
    return checked.to_measured("matmuls")


def logits(backend: Backend) -> Measured:
    """Compare a head's matmuls, which are float32 in every dtype, with a bias and without."""
    checked = Compared(backend, "linear")
    for dtype, (inputs, outputs) in itertools.product(checked.dtypes, HEADS):
        doing(f"{inputs} inputs, {outputs} codes, {short(dtype)}")
        given = (normal(outputs, outputs, inputs) * inputs**-0.5).to(dtype)
        packed = backend.pack(given.to(backend.device))
        for rows, bias in ((3, None), (1, normal(3, outputs).to(dtype))):
            x = _inputs(rows, rows, inputs, dtype)
            what = f"logits of {outputs} codes, {rows} rows, in {short(dtype)}"
            _compare_product(checked, packed, given.double(), x, bias, what, sums=True)
    return checked.to_measured(f"matmuls of heads of up to {max(n for _, n in HEADS)} codes")


def fewer_bits(backend: Backend) -> Measured:
    """Compare matmuls with quantized matrices, packed in one step and in two, of drafts too."""
    checked, device = Compared(backend, "pack", "linear"), backend.device
    shapes = ((768, 130), (100, 37))
    for dtype, how, (inputs, outputs), drafts in itertools.product(
        checked.dtypes, ROUNDINGS.values(), shapes, (False, True)
    ):
        given = (normal(outputs, outputs, inputs) * inputs**-0.5).to(dtype)
        made = round_weight(given, how, tries=1) if drafts else round_weight(given, how)
        shown = f"{how.name} weights of {inputs} inputs in {short(dtype)}" + ", drafts" * drafts
        doing(shown)
        offset = None if made.offset is None else made.offset.to(device)
        there = replace(made, codes=made.codes.to(device), step=made.step.to(device), offset=offset)
        packed = [backend.pack(there, drafts=drafts)]
        if drafts:
            packed.append(backend.pack(backend.pack(given.to(device)), how, drafts))
        weight = made.dense(torch.float32).double()
        for one, rows in itertools.product(packed, (1, 5, 64)):
            x = normal(rows, rows, inputs) if drafts else _inputs(rows, rows, inputs, torch.float32)
            bias = normal(3, outputs).to(dtype) if rows == 5 else None
            what = f"{shown}, {rows} rows"
            _compare_product(checked, one, weight, x.to(dtype), bias, what, drafts=drafts)
    return checked.to_measured("matmuls with quantized weights")


#: Widths of norms and their epsilons, as published models have them, and an odd one.
NORMS = ((768, 1e-5), (1280, 1e-5), (2048, 1e-6), (4096, 1e-5), (37, 1e-6))
#: Sizes of a norm's rows: usual, so small that epsilon counts, large, and nothing at all.
SCALES = (1.0, 1e-2, 3e-3, 30.0, 0.0)


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rms_norm(backend: Backend) -> Measured:
    """Compare the norm, of rows so small that epsilon counts, too; a wrong epsilon is found."""
    checked = Compared(backend, "rms_norm")
    for dtype, (width, eps), rows in itertools.product(checked.dtypes, NORMS, (1, 5, MOST)):
        weight = (1 + 0.2 * normal(1, width)).to(dtype)
        scale = torch.tensor([SCALES[(row + rows) % len(SCALES)] for row in range(rows)])
        x = (normal(rows, rows, width) * scale.unsqueeze(1)).to(dtype)
        x = x.unsqueeze(0) if rows > 1 else x
        what = f"norm of {width}, {rows} rows, in {short(dtype)}"
        doing(what)
        got = backend.rms_norm(x.to(backend.device), weight.to(backend.device), eps)
        wide, times = x.double(), weight.double()
        want = _normalize(wide, times, eps)
        near = want.abs() * FLOAT32 * MARGIN * (4 + width**0.5) + roundoff(want, dtype, 2)
        causes = partial(_wrong_norms, got, wide, times, eps)
        checked.hold(got, want, near + 1e-30, what, dtype, causes)
    return checked.to_measured("norms")


def _wrong_norms(got: Tensor, x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
    """Return norms as they are often got wrong; an epsilon that would explain ``got`` is worked out."""
    found = {
        "eps is left out": _normalize(x, weight, 1e-30),
        "the mean is taken off first": _normalize(x - x.mean(-1, keepdim=True), weight, eps),
        "the weight is left out": _normalize(x, torch.ones_like(weight), eps),
        "eps is added outside the root": x
        / (x.square().mean(-1, keepdim=True).sqrt() + eps)
        * weight,
        "squares are summed, where their mean is wanted": _normalize(x, weight, eps / x.shape[-1])
        * x.shape[-1] ** -0.5,
    }
    if got.shape != x.shape:
        return found
    # got = x w / sqrt(mean + eps): of rows where the mean is small, eps is what is left.
    root = x * weight / got.detach().cpu().double()
    mean = x.square().mean(-1, keepdim=True)
    small = ((mean < 1e-3) & (mean > 0)).expand_as(x) & root.isfinite()
    if bool(small.any()):
        seen = float((root.square() - mean)[small].median())
        if seen > eps / 100:
            shown = f"{seen:.2g}" if got.dtype == torch.float32 else f"{seen:.1g}"
            found[f"eps is {shown}, not {eps:g}"] = _normalize(x, weight, seen)
    return found


#: Hidden sizes of the published models, and an odd one.
HIDDEN = (48, 2048, 3456, 11008, 37)


def swiglu(backend: Backend) -> Measured:
    """Compare the gated product, of gates so large that their sigmoid is 0 or 1, too."""
    checked = Compared(backend, "swiglu")
    for dtype, hidden, rows in itertools.product(checked.dtypes, HIDDEN, (1, 5, MOST)):
        x = normal(hidden + rows, rows, 2 * hidden)
        x[:, ::7] *= 6.0
        x = (x.unsqueeze(0) if rows > 1 else x).to(dtype)
        what = f"gate of {hidden}, {rows} rows, in {short(dtype)}"
        doing(what)
        got = backend.swiglu(x.to(backend.device))
        gate, up = x.double().chunk(2, dim=-1)
        want, both = gate * gate.sigmoid() * up, gate * up
        # The sigmoid is off by a few roundings of 1, whatever it is.
        near = roundoff(both, torch.float32, 4) + roundoff(want, dtype, 2)
        near = near + roundoff(both, dtype, 1 / 4) + SMALLEST[dtype] * up.abs()
        checked.hold(got, want, near, what, dtype, partial(_wrong_gates, x.double()))
    return checked.to_measured("gated products")


def _wrong_gates(x: Tensor) -> dict[str, Tensor]:
    """Return gated products that are often got wrong."""
    gate, up = x.chunk(2, dim=-1)
    return {
        "the halves are exchanged: the second is gated": up * up.sigmoid() * gate,
        "the gate is its sigmoid alone": gate.sigmoid() * up,
        "the gate is a GELU": F.gelu(gate) * up,
        "gate and up alternate": x[..., ::2] * x[..., ::2].sigmoid() * x[..., 1::2],
        "up is left out": gate * gate.sigmoid(),
    }


def put(backend: Backend) -> Measured:
    """Write entries of a buffer, and hold one that is written afterwards: both as the reference does."""
    count = 0
    for dtype in (torch.float32, backend.index):
        for tail in ((), (6,)):
            buffer = (100 * normal(1, 2, 3, 5, *tail)).to(dtype)
            values = (100 * normal(2, 2, 4, *tail)).to(dtype)
            index = torch.tensor([14, 3, 4, 9])
            want = buffer.clone()
            want.flatten(1, 2)[:, index] = values
            given = buffer.to(backend.device, copy=True)
            held = backend.snapshot(given)
            if not torch.equal(held.cpu(), buffer):
                raise Failed(f"held in {short(dtype)} is not what the buffer holds")
            backend.put(
                given, 1, index.to(backend.device, backend.index), values.to(backend.device)
            )
            compare(given, want.double(), 0.0, f"put in {short(dtype)}", dtype=dtype)
            count += 1
    return Measured(
        f"{count} writes to entries, bit for bit{left_to_reference(backend, 'put', 'snapshot')}"
    )
