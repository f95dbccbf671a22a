"""Products of tens of rows with quantized weights, by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cuda_double import doubled_backend
from support.interpreter import compiles, interpreted
from torch import Tensor

from lantern_accel.nn.rounding import ROUNDINGS, round_weight

LONG = pytest.mark.long
#: Multiprocessors with which inputs are shared among programs, and with which they are not.
MANY, ONE = 82, 1


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns_of(name: str, outputs: int, inputs: int) -> Any:
    from lantern_accel_cuda.kernels.rounded import Columns

    return Columns.of(round_weight(drawn(1, outputs, inputs) * inputs**-0.5, ROUNDINGS[name]))


@interpreted
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "cores"),
    [
        (17, 33, 67, MANY),
        *(
            pytest.param(*one, marks=LONG)
            for one in ((33, 20, 576, MANY), (128, 72, 576, MANY), (70, 70, 130, ONE))
        ),
    ],
)
def test_products_are_those_of_float64_and_of_the_kernel_of_few_rows(
    name: str, rows: int, outputs: int, inputs: int, cores: int
) -> None:
    from lantern_accel_cuda.kernels import rounded as kernels

    columns = columns_of(name, outputs, inputs)
    x, bias = drawn(2, rows, inputs).half(), drawn(3, outputs).half()
    dense = columns.dense(torch.float64)
    scale = x.double().abs() @ dense.abs().t() + bias.double().abs()
    for added, sums in ((None, True), (bias, False)):
        want = x.double() @ dense.t() + (0 if added is None else added.double())
        got = kernels.multiply(x, columns, added, cores, sums)
        assert got.dtype == (torch.float32 if sums else torch.float16)
        bound = inputs * 2.0**-23 * scale + torch.finfo(got.dtype).eps * want.abs()
        assert ((got.double() - want).abs() <= bound).all()
        few = kernels.multiply(x, columns, added, cores, sums, tiled=False)
        assert ((got.double() - few.double()).abs() <= 2 * bound).all()


@interpreted
@pytest.mark.parametrize(
    "name", [n if n == "int4" else pytest.param(n, marks=LONG) for n in ROUNDINGS]
)
def test_a_row_gives_the_same_bits_among_any_number_of_rows(name: str) -> None:
    from lantern_accel_cuda.kernels import rounded as kernels
    from lantern_accel_cuda.kernels.counters import counters_of

    columns, x = columns_of(name, 40, 640), drawn(5, 128, 640).half()
    assert kernels.pieces_of(640, 40, MANY) > 1
    whole = kernels.multiply(x, columns, None, MANY, sums=True)
    for rows in (17, 40):  # of blocks of 32 and of 64, where the whole is one of 128
        part = kernels.multiply(x[:rows], columns, None, MANY, sums=True)
        assert torch.equal(part, whole[:rows])
    assert not bool(counters_of(torch.device("cpu"), 1).any())


@interpreted
def test_a_row_that_is_no_number_spoils_no_other() -> None:
    from lantern_accel_cuda.kernels import rounded as kernels

    columns, x = columns_of("int4", 20, 130), drawn(6, 18, 130).half()
    want = kernels.multiply(x, columns, None, MANY)
    x[3, 129] = float("nan")
    got = kernels.multiply(x, columns, None, MANY)
    assert not bool(got[3].isfinite().any())
    assert torch.equal(got[:3], want[:3]) and torch.equal(got[4:], want[4:])


@compiles
def test_rows_decide_what_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_cuda.kernels import rounded as kernels

    backend, _ = doubled_backend(monkeypatch, preset="fast")
    seen: list[bool] = []
    monkeypatch.setattr(kernels, "multiply", lambda *given: seen.append(given[-1]) or given[0])
    columns = columns_of("int6", 20, 70)

    def asked(rows: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        backend.linear(torch.zeros(1, rows, 70, dtype=dtype), columns)
        return seen.pop()

    most = kernels.MOST_ROWS
    assert [asked(rows) for rows in (1, 16, 17, most, most + 1)] == [False] * 2 + [True] * 2 + [
        False
    ]
    assert not asked(32, torch.float32)
    backend.trust = lambda kernel: not kernel.startswith("tiles")  # its check failed
    assert not asked(32)
