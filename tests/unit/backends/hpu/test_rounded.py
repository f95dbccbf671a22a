"""Products with weights in fewer bits: how near they are, and which operators they are made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lantern_accel.device.packed import dense
from lantern_accel.errors import RequestError
from lantern_accel.memory.footprint import copy_bytes
from lantern_accel.nn.rounding import ROUNDINGS, round_weight, rounding
from lantern_accel.nn.transformer import Projection, pack, rounded_copy
from lantern_accel.testing.trace import OpRecorder
from lantern_accel_hpu import operators
from lantern_accel_hpu.kernels import HPUOps
from lantern_accel_hpu.rounded import ByteCodes
from lantern_accel_hpu.software import floats

OPS = HPUOps()
#: The largest relative error of one rounding.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
KINDS = [(name, dtype) for name in ROUNDINGS for dtype in UNIT]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def allowed(x: Tensor, weight: ByteCodes, exact: Tensor, bias: Tensor | None) -> Tensor:
    """Return by how much a product may be off, from the roundings that it is made of."""
    unit, single = UNIT[x.dtype], UNIT[torch.float32]
    dense, far = weight.dense(torch.float64).abs(), x.double().abs()
    whole = far @ dense.t()
    own = 0.0 if bias is None else bias.double().abs()
    # Sums of float32, in any order; the step and the dense form are float32 too.
    sums = (x.shape[-1] + 4) * single * (whole + own)
    out = exact.abs() + own  # rounded when it leaves the matrix engine, and at the end
    if weight.offset is None:
        return sums + (2 * unit + 2 * single) * (out + own)
    # A code times its step is rounded, then its sum with the offset.
    parts = weight.codes.double() * weight.step.double()
    parts = parts.abs().flatten(0, 1)[: weight.shape[1]]
    sums += (x.shape[-1] + 4) * single * (far @ parts)
    return sums + unit * (far @ parts + whole + 2 * out) * (1 + 2 * unit)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 33),
    inputs=st.integers(1, 200),
    out=st.integers(1, 70),
    seed=st.integers(0, 2**20),
    biased=st.booleans(),
    shift=st.sampled_from([0.0, 3.0]),
)
def test_a_product_is_as_near_as_its_roundings(
    kind: tuple[str, torch.dtype],
    rows: int,
    inputs: int,
    out: int,
    seed: int,
    biased: bool,
    shift: float,
) -> None:
    name, dtype = kind
    kept = round_weight(drawn(seed, out, inputs) + shift, ROUNDINGS[name])
    weight = OPS.pack(kept)
    x = drawn(seed + 1, 1, rows, inputs).to(dtype)
    bias = drawn(seed + 2, out).to(dtype) if biased else None
    got = OPS.linear(x, weight, bias)
    assert (got.dtype, got.shape) == (dtype, (1, rows, out))
    exact = x.double() @ kept.dense(torch.float64).t()
    wanted = exact if bias is None else exact + bias.double()
    assert ((got.double() - wanted).abs() <= allowed(x, weight, exact, bias)).all()


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("inputs", [64, 100, 7])
@torch.inference_mode()
def test_packing_rounds_nothing_and_shifts_no_byte(
    name: str, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the weights are the reference's, bit for bit.

    The vendor's own tests expect shifts of bytes to fail.
    """
    monkeypatch.setattr("lantern_accel_hpu.rounded._AT_ONCE", 300)  # a few rows at a time
    with OpRecorder(torch.device("cpu")) as seen:
        kept = round_weight(drawn(1, 9, inputs), ROUNDINGS[name])
        weight = OPS.pack(kept)
        product = OPS.linear(torch.eye(inputs), weight)
    shifted = {one[1][1] for one in seen.signature if "shift" in one[0]}
    assert not shifted & {torch.uint8, torch.int8}
    assert weight.codes.dtype == torch.int8
    for made in (dense(weight), product.t()):
        assert torch.equal(made, kept.dense(torch.float32))
    assert torch.equal(weight.dense(torch.bfloat16), kept.dense(torch.bfloat16))


@torch.inference_mode()
def test_floats_of_8_bits_are_made_and_multiplied_as_the_bridge_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the software HPU's functions, which have the bridge's signatures, and for drafts alone."""
    x, how = drawn(2, 2, 5, 70), rounding("fp8")
    weight = drawn(1, 33, 70) * torch.logspace(-3, 3, 33).unsqueeze(1)
    weight[3] = 0
    for drafts in (True, False):  # the bridge lacks them, or they are no draft's
        with pytest.raises(RequestError, match="fp8 are for copies that draft"):
            OPS.pack(weight, how, drafts)
        given = {"cast_to_fp8_v2": floats._cast, "fp8_gemm_v2": floats._gemm}
        monkeypatch.setattr(torch.ops, "hpu", SimpleNamespace(**given))
    large = torch.tensor([247.0, 248.0])
    assert floats._cast(large, dtype=torch.float8_e4m3fn)[0].float().isnan().tolist() == [
        False,
        True,
    ]
    # Numbers of 4 significant bits up to 240: each is off by a sixteenth, or by half a step of the least.
    for dtype, unit in UNIT.items():
        kept = OPS.pack(weight.to(dtype), how, drafts=True)
        assert (kept.nbytes, kept.bits_per_weight) == (33 * 70 + 4 * 33, 8)
        assert kept.codes.float().abs().amax(1).tolist() == [240.0 * (n != 3) for n in range(33)]
        made, wanted = kept.dense(torch.float64), weight.to(dtype).double()
        off = wanted.abs() / 16 * (1 + 4 * unit) + wanted.abs().amax(1, keepdim=True) / 240 * 2**-10
        assert ((made - wanted).abs() <= off).all()
        rows, bias = x.to(dtype).double(), drawn(3, 33).to(dtype)
        exact = rows @ made.t() + bias.double()
        least = rows.abs().amax(-1, keepdim=True) / 240 * 2**-10
        most = (rows.abs() / 16 * (1 + 4 * unit) + least) @ made.abs().t() + unit * exact.abs()
        got = OPS.linear(x.to(dtype), kept, bias).double()
        assert ((got - exact).abs() <= most * (1 + 2**-7)).all()
        assert torch.equal(got[..., 3], bias[3].double().expand(2, 5))


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_a_few_operators_that_are_listed(
    name: str, dtype: torch.dtype, biased: bool
) -> None:
    weight = OPS.pack(round_weight(drawn(1, 9, 100), ROUNDINGS[name]))
    bias = drawn(2, 9).to(dtype) if biased else None
    x = drawn(3, 2, 5, 100).to(dtype)
    recorder = OpRecorder(torch.device("cpu"), operators.rules())
    with torch.inference_mode(), recorder:
        OPS.linear(x, weight, bias)
    assert not recorder.violations
    # By groups a bias is part of the product; a row's result in float32 is not cast.
    most = 4 + (biased if weight.offset is None else 0)
    assert recorder.launched <= most
    assert recorder.launched == most - (weight.offset is None and dtype == torch.float32)


def test_a_copy_takes_the_memory_that_is_planned() -> None:
    target = torch.nn.Sequential(Projection(128, 40, bias=False), Projection(64, 32, bias=False))
    for name, how in ROUNDINGS.items():
        copied = rounded_copy(target, OPS, how, drafts=True)
        held = sum(part.packed.nbytes for part in copied)
        rows = 4 * (40 + 32) if how.group == 0 else 0
        assert copy_bytes(target, name, OPS) == held - rows
        assert all(part.packed.bits_per_weight == (8.5 if how.group else 8) for part in copied)
        assert copy_bytes(target, name) <= copy_bytes(target, name, OPS)


def test_a_packed_model_s_layers_multiply_by_it() -> None:
    layer = Projection(100, 9)
    bias, x, residual = layer.bias, drawn(1, 1, 3, 100), drawn(2, 1, 3, 9)
    kept = round_weight(layer.weight, ROUNDINGS["int6"])
    pack(layer, OPS, ROUNDINGS["int6"])
    assert isinstance(layer.packed, ByteCodes)
    with torch.inference_mode():
        plain, added = layer(x, OPS), layer(x, OPS, residual)
        wanted = torch.nn.functional.linear(x, kept.dense(torch.float32), bias)
    torch.testing.assert_close(plain, wanted)
    torch.testing.assert_close(added, wanted + residual)
