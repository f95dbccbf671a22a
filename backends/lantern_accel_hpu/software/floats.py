"""Stands in for the bridge's products of floating-point numbers of 8 bits, in exact arithmetic.

Schemas are release 1.19's. A Gaudi 2 has e4m3 as IEEE would: what rounds to more than 240 is infinite,
shown here as NaN, for torch's e4m3 has no infinity.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.library import Library

CAST = (
    "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, "
    "bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)"
)
GEMM = (
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
    "Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, "
    "int[]? B_scale_shape=None) -> Tensor"
)
#: Where numbers begin that round to more than 240, the largest one.
TOO_LARGE = 248.0


@functools.cache
def define() -> Library:
    """Register both operators, once a process; they are there as long as what is returned."""
    library = Library("hpu", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    library.define(CAST)  # type: ignore[no-untyped-call]
    library.define(GEMM)  # type: ignore[no-untyped-call]
    # The same functions for tensors without data, whose shapes and dtypes they show.
    library.impl("cast_to_fp8_v2", _cast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    library.impl("fp8_gemm_v2", _gemm, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return library


def _cast(
    input: Tensor,
    scale: Tensor | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    if stochastic_rounding or is_amax or scale_shape is not None or dtype != torch.float8_e4m3fn:
        raise RuntimeError("the software HPU rounds to the nearest e4m3 number alone")
    values = input.float() if scale is None else input.float() * scale.float()
    values = torch.where(values.abs() < TOO_LARGE, values, float("nan"))
    return values.to(dtype), torch.zeros((), dtype=torch.float32, device=input.device)


def _gemm(
    A: Tensor,
    trans_A: bool,
    B: Tensor,
    trans_B: bool,
    D: Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: list[int] | None = None,
) -> Tensor:
    if D is not None or accumulate or B_scale_shape is not None:
        raise RuntimeError("the software HPU adds products to nothing, with a scale a row")
    a, b = A.double(), B.double()
    out = (a.t() if trans_A else a) @ (b.t() if trans_B else b)
    for scale in (A_scale_inv, B_scale_inv):
        if scale is not None:
            out = out * scale.double()
    if bias is not None:
        out = out + bias.double()
    return out.to(out_dtype)
