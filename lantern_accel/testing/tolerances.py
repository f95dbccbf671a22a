"""How far correct arithmetic may be from float64: bounds from a dtype's rounding and the sums.

No number here is a processor's. Sums are taken to be in float32, in any order, with or without
contracted multiply-adds, or in pairs that are aligned to 26 bits, as one matrix engine makes them: each
addition is off by a rounding of what has been summed so far. Such errors have random signs, so that n of
them come to about ``sqrt(n)``; a margin of :data:`MARGIN` makes correct devices pass at every shape
of the kit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.device.backend import DTYPES, Backend

#: Half of the distance between neighbouring numbers of a dtype, relative to them.
ROUNDING: dict[torch.dtype, float] = {
    dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES.values()
}
#: Half of the distance between a dtype's smallest numbers; float32's and bfloat16's are not met here.
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}
#: Rounding of a sum's parts, which are float32 in every dtype.
FLOAT32 = ROUNDING[torch.float32]
#: What a bound has above the error that is expected.
MARGIN = 4.0


def dtypes_of(backend: Backend) -> list[torch.dtype]:
    """Return the dtypes that a backend computes in."""
    return [dtype for name, dtype in DTYPES.items() if backend.support(name)]


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def roundoff(value: Tensor, dtype: torch.dtype, times: float = 1.0) -> Tensor:
    """Bound what ``times`` roundings to a dtype change of numbers like ``value``."""
    off: Tensor = MARGIN * times * ROUNDING[dtype] * value.abs() + SMALLEST[dtype]
    return off


def product(x: Tensor, weight: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the error of ``x [..., n] @ weight [m, n].T``, whose float64 result is ``value [..., m]``.

    Sums of n products in float32; the result stored in the dtype; and each factor rounded once more to
    it, as devices do that split a sum, or that put activations in integers.
    """
    n = x.shape[-1]
    absolute = x.abs() @ weight.abs().t()
    spread = (x.square() @ weight.square().t()).sqrt()
    sums = MARGIN * n**0.5 * FLOAT32 * absolute
    off: Tensor = sums + roundoff(value, dtype, 2) + MARGIN * 2 * ROUNDING[dtype] * spread
    return off
