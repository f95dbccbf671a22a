"""Native kernels, each instruction set against float64: ragged sizes, any number of rows and threads."""

from __future__ import annotations

import pytest
import torch
from support import native

from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.testing import CHECKS, operations, rotation, run_check, trunks
from lantern_accel.testing.served import watching
from lantern_accel_cpu.native import kernels as module
from lantern_accel_cpu.native.backend import NativeCpu

pytestmark = native.needs_native
UNITS = native.unit_cases()
DTYPES = [torch.float32, torch.bfloat16]
#: In and out: one panel, ragged, odd, deeper than one piece.
SIZES = [(32, 32), (33, 48), (5, 7), (256, 96), (2100, 40)]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_matrix_gives_back_its_weights(unit: str, dtype: torch.dtype) -> None:
    kernels = native.kernels(unit)
    for k, n in SIZES:
        weight = native.draw(1, n, k, dtype=dtype) * k**-0.5
        packed = kernels.pack(weight)
        assert packed.shape == weight.shape
        if isinstance(packed, module.WordPanels):
            off = (packed.dense(dtype) - weight).float().abs()
            large = weight.float().abs() >= weight.float().abs().amax(1, keepdim=True) / 64
            assert torch.equal(packed.dense(dtype)[large], weight[large])
            assert bool((off <= 2**-14 * weight.float().abs().amax(1, keepdim=True)).all())
        else:
            assert torch.equal(packed.dense(dtype), weight)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("how", ["full", "int8", "int6"])
def test_sums_are_those_that_a_product_rounds(unit: str, how: str) -> None:
    kernels = native.kernels(unit)
    weight, bias = native.draw(1, 70, 130, dtype=torch.bfloat16), native.draw(2, 70)
    packed = kernels.pack(weight, words=False)
    packed = packed if how == "full" else kernels.in_fewer_bits(packed, ROUNDINGS[how], False)
    x = native.draw(3, 2, 5, 130, dtype=torch.bfloat16)
    for added in (None, bias.bfloat16()):
        sums = kernels.linear(x, packed, added, sums=True)
        assert sums.dtype == torch.float32 and sums.shape == (2, 5, 70)
        assert torch.equal(sums.bfloat16(), kernels.linear(x, packed, added))
        assert not torch.equal(sums.bfloat16().float(), sums)


@pytest.mark.parametrize("unit", UNITS)
def test_a_weight_that_is_no_number_stays_in_its_output(unit: str) -> None:
    kernels = native.kernels(unit)
    weight = native.draw(1, 40, 200, dtype=torch.bfloat16)
    weight[3, 130] = float("nan")
    weight[7, 130] = float("inf")
    x = native.draw(2, 7, 200, dtype=torch.bfloat16)
    found = kernels.linear(x, kernels.pack(weight), None).isfinite()
    assert found.any(0).equal(found.all(0)) and (~found[0]).nonzero().flatten().tolist() == [3, 7]


@pytest.mark.product("kind", "dtype")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", native.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_product_depends_on_no_other_row_and_on_no_thread(
    unit: str, kind: str, dtype: torch.dtype
) -> None:
    kernels = native.kernels(unit)
    weight = native.kept(kernels, native.draw(1, 1000, 330, dtype=dtype), kind)
    x = native.draw(2, 130, 330, dtype=dtype)
    with native.threads(1):
        whole = kernels.linear(x, weight, None)
        for rows in (1, 2, 3, 4, 6, 7, 11, 12, 13, 18, 29, 97):
            assert torch.equal(kernels.linear(x[:rows], weight, None), whole[:rows])
    for count in (2, 3, 11):  # fewer threads than lanes of work, and more
        with native.threads(count):
            for _ in range(10):
                assert torch.equal(kernels.linear(x, weight, None), whole)
    if kind.endswith("copy"):
        return  # in whole numbers, of which none is no number
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[33, 190] = bad
        for border in (
            0,
            1,
        ):  # rows from which on tiles multiply, where there are tiles; 0: measured
            kernels.library.tiles_from(border)
            found = kernels.linear(x, weight, None).isfinite()
            assert not found[33].any() and found[:33].all() and found[34:].all()
    kernels.library.tiles_from(0)


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_any_size_are_multiplied(unit: str) -> None:
    kernels = native.kernels(unit)
    weight, x = native.draw(1, 40, 200), native.draw(2, 4, 200)
    scale = torch.tensor([1.0, 1e-18, 1e18, 0.0]).unsqueeze(1)
    for small in (1.0, 1e-12, 0.0):
        packed = kernels.pack((weight * small).bfloat16())
        want = (x * scale).bfloat16().double() @ (weight * small).bfloat16().double().T
        got = kernels.linear((x * scale).bfloat16(), packed, None).double()
        most = want.abs().amax(1, keepdim=True)
        assert bool(((got - want).abs() <= 2e-2 * most).all())


#: What the kit compares with float64, and sizes for it: whole vectors and ragged ones.
SIZES_OF = {
    "linear": ("operation.linear", operations, "MATRICES", SIZES),
    "rms_norm": ("operation.rms_norm", operations, "NORMS", [(n, 1e-5) for n in (8, 48, 100, 257)]),
    "swiglu": ("operation.swiglu", operations, "HIDDEN", (8, 48, 100, 257)),
    "rotate_write": ("operation.rotate_write", rotation, "HEADS", ((3, 64), (2, 8), (3, 20))),
    "trunk": ("attention.trunk", trunks, "STACKS",
              ((2, 64, 96, 1e-5), (3, 20, 50, 1e-6), (4, 8, 48, 1e-5))),
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("operation", SIZES_OF)
def test_the_kit_finds_the_kernels_right_and_nothing_else_serves(
    operation: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, module, name, sizes = SIZES_OF[operation]
    monkeypatch.setattr(module, name, sizes)
    monkeypatch.setattr("lantern_accel.testing.result.dtypes_of", lambda backend: DTYPES)
    backend = NativeCpu(0, native.kernels(unit))
    with native.threads(2), watching(backend) as seen:
        outcome = run_check(backend, check, CHECKS[check])
    assert outcome.state == "passed", outcome
    found = seen.counts[operation]
    assert found.calls > 10 and not found.reference and not found.operators


@pytest.mark.product("dtype", "heads", "width")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(3, 64), (1, 32), (2, 8), (3, 20), (2, 128)])
@pytest.mark.parametrize("count", [1, 2, 3, 9, 17, 33])
@pytest.mark.parametrize("sees", [45, 37])
def test_attention_is_that_of_float64(
    unit: str, dtype: torch.dtype, heads: int, width: int, count: int, sees: int
) -> None:
    rows, capacity = 2, 45
    kernels = native.kernels(unit)
    kv = native.filled_cache(2, rows, capacity, heads, width, dtype)
    visible = torch.rand(rows, 1, count, capacity, generator=torch.Generator().manual_seed(count))
    seen = visible > 0.6
    seen[:, :, :, 20] = True
    seen[0, 0, :, 3] = False
    q = native.draw(7, rows, count, heads, width, dtype=dtype)
    k, v = (side[:, :, :sees] for side in native.sides(kv, 1))
    seen = seen[..., :sees]
    want = native.attention(q, k, v, seen)
    # What no query sees is not even read.
    hidden = ~seen.any(2)[:, 0]
    for half in (k, v):
        half.transpose(1, 2)[hidden] = float("nan")
    got = kernels.attend(q, kv, 1, seen)
    assert float((got.double() - want).abs().max()) < native.TOLERANCE[dtype]


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    kv = native.filled_cache(1, 1, 10, 1, 64, torch.float32)
    seen = torch.zeros(1, 1, 2, 10, dtype=torch.bool)
    seen[0, 0, 1, 4] = True
    got = native.kernels().attend(native.draw(1, 1, 2, 1, 64), kv, 0, seen)
    assert torch.equal(got[0, 0, 0], torch.zeros(64))
    # One slot alone comes back bit for bit.
    assert torch.equal(got[0, 1, 0], kv.values[0][4])
