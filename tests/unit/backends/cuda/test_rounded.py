"""Products with quantized weights, by Triton's interpreter on host memory.

Interpreted tests run in a process of their own (:mod:`support.interpreter`).
"""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend
from support.interpreter import compiles, interpreted

from lantern_accel.nn.rounding import ROUNDINGS, Rounded, round_weight
from lantern_accel.nn.transformer import Projection, pack

LONG = pytest.mark.long
#: Multiprocessors of an RTX 3090.
CORES = 82


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@interpreted
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (33, 67), (70, 130), (1, 1)])
def test_columns_give_back_what_they_were_made_of(name: str, outputs: int, inputs: int) -> None:
    from lantern_accel_cuda.kernels.rounded import Columns

    made = round_weight(drawn(0, outputs, inputs), ROUNDINGS[name])
    columns = Columns.of(made)
    back = columns.to_rounded()
    assert torch.equal(back.codes, made.codes) and torch.equal(back.step, made.step)
    assert made.offset is None or torch.equal(back.offset, made.offset)
    assert torch.equal(columns.dense(torch.float32), made.dense(torch.float32))
    if outputs % 16 == 0:
        assert columns.nbytes == made.nbytes


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (5, 33, 67),
        *(
            pytest.param(*case, marks=LONG)
            for case in ((2, 20, 576), (1, 70, 64), (40, 20, 130), (2, 72, 1088))
        ),
    ],
)
def test_products_are_those_of_the_dense_matrix(
    rows: int, outputs: int, inputs: int, name: str, dtype: torch.dtype
) -> None:
    from lantern_accel_cuda.kernels import rounded as kernels

    made = round_weight(drawn(1, outputs, inputs) * inputs**-0.5, ROUNDINGS[name])
    columns = kernels.Columns.of(made)
    x, bias = drawn(2, 2, rows, inputs).to(dtype)[:1], drawn(3, outputs).to(dtype)
    scale = x.double().abs() @ made.dense(torch.float64).abs().t()
    for added in (None, bias):
        want = x.double() @ made.dense(torch.float64).t()
        want = want if added is None else want + added.double()
        for sums in (False, True):
            got = kernels.multiply(x, columns, added, CORES, sums, tiled=False)
            assert got.dtype == (torch.float32 if sums else dtype)
            assert got.shape == (1, rows, outputs)
            # A sum of float32, and its rounding at the end.
            last = torch.finfo(got.dtype).eps * want.abs()
            assert ((got.double() - want).abs() <= inputs * 2.0**-23 * scale + last).all()


@interpreted
@pytest.mark.parametrize(
    "name", [n if n == "int4" else pytest.param(n, marks=LONG) for n in ROUNDINGS]
)
def test_a_rows_product_depends_on_no_other_row_of_its_block(name: str) -> None:
    from lantern_accel_cuda.kernels import rounded as kernels

    columns = kernels.Columns.of(round_weight(drawn(4, 40, 640), ROUNDINGS[name]))
    assert kernels.pieces_of(640, 40, CORES) > 1
    x = drawn(5, 20, 640).half()
    whole = kernels.multiply(x, columns, None, CORES, tiled=False)
    for rows in (1, 17):
        assert torch.equal(
            kernels.multiply(x[:rows], columns, None, CORES, False, False), whole[:rows]
        )


@interpreted
def test_many_rows_take_the_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_cuda.kernels import rounded as kernels

    made = round_weight(drawn(6, 20, 70), ROUNDINGS["int4"])
    x = drawn(7, kernels.MOST_ROWS + 1, 70)
    monkeypatch.setattr(kernels, "product", None)
    got = kernels.multiply(x, kernels.Columns.of(made), None, CORES)
    assert torch.equal(got, x @ made.dense(torch.float32).t())


@interpreted
def test_a_model_is_packed_for_the_kernel_and_multiplies_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lantern_accel_cuda.kernels.rounded import Columns

    backend, _ = doubled_backend(monkeypatch, preset="fast")
    safe, _ = doubled_backend(monkeypatch)
    assert backend.preferences.reads_fewer_bits and not safe.preferences.reads_fewer_bits
    x, residual = drawn(8, 2, 3, 70), drawn(9, 2, 3, 24)
    for name, how in ROUNDINGS.items():
        found = []
        for one, kind in ((backend, Columns), (safe, Rounded)):
            part = Projection(70, 24, bias=False)
            with torch.no_grad():
                part.weight.copy_(drawn(10, 24, 70))
            pack(part, one, how)
            assert isinstance(part.packed, kind)
            with torch.inference_mode():
                found.append((part(x, one), part(x, one, residual.clone())))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4, msg=name)


@compiles
def test_shapes_are_known_without_a_product() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lantern_accel_cuda.kernels import rounded as kernels

    columns = kernels.Columns.of(round_weight(drawn(0, 20, 70), ROUNDINGS["int6"]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, 70, dtype=torch.bfloat16)
        got = kernels.multiply(x, columns, None, CORES)
    assert got.shape == (2, 3, 20) and got.dtype == torch.bfloat16


@compiles
def test_inputs_are_shared_where_outputs_fill_no_card() -> None:
    from lantern_accel_cuda.kernels.rounded import LEAST_GROUPS, pieces_of

    assert pieces_of(1280, 64 * 400, CORES) == 1
    assert pieces_of(1280, 1280, CORES) == 1280 // 64 // LEAST_GROUPS
    assert pieces_of(64, 16, CORES) == 1
