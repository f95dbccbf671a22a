"""Running sums by products, where a device adds float32 products in a way of its own.

Gaudi 2's matrix engine adds two products and the sum so far in one go: all three are aligned to the
largest, cut to 26 bits there, and rounded once (its open model, ``chip_fma/gaudi2_fma.cpp``, without
``GAUDI2_FORCE_MME_FP32_IEEE``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lantern_accel.device.operations import TensorOps

KEPT = 26


def aligned(parts: list[Tensor], cut: Callable[[Tensor], Tensor]) -> Tensor:
    """Add numbers, float64, that are cut to the bits that the largest keeps; round to float32."""
    largest = torch.stack([one.abs() for one in parts]).amax(dim=0)
    _, exponent = torch.frexp(largest)  # largest < 2**exponent
    unit = torch.ldexp(torch.ones_like(largest), exponent - KEPT)
    total = torch.zeros_like(largest)
    for one in parts:
        total = total + cut(one / unit) * unit
    return total.float().double()


class Pairs(TorchFunctionMode):
    """Multiplies matrices as the engine does; ``apart``: how far the products of a pair lie apart."""

    def __init__(self, apart: int, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.apart, self.cut, self.products = apart, cut, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("matmul", "__matmul__"):
            return func(*args, **(kwargs or {}))
        self.products += 1
        return self._product(*(one.double() for one in args)).float()

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        deep = a.shape[-1]
        apart = self.apart or deep // 2
        total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
        firsts = [i for i in range(deep) if i // apart % 2 == 0]
        for i in firsts:
            two = [i] if i + apart >= deep else [i, i + apart]
            terms = [a[..., j].unsqueeze(-1) * b[j] for j in two]
            total = aligned([total, *terms], self.cut)
        return total


def rows(codes: int) -> Tensor:
    """Return distributions: flat, peaked, filtered, of every magnitude, and one code after the other."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, codes, generator=generator)
    flat, peaked = (x[0] / 4).softmax(-1), (8 * x[1]).softmax(-1)
    few = torch.where(x[2] < x[2].topk(codes // 8).values[-1], -torch.inf, x[2]).softmax(-1)
    wide = (20 * x[3]).exp()
    falling = torch.arange(codes, 0, -1).float() ** 3
    return torch.stack((flat, peaked, few, wide, falling))


@pytest.mark.parametrize("cut", [torch.trunc, torch.round], ids=["cut off", "rounded"])
@pytest.mark.parametrize("apart", [1, 2, 0], ids=["neighbours", "every other", "halves"])
@pytest.mark.parametrize("codes", [96, 2048, 1000])
def test_sums_of_pairs_never_fall_and_draw_the_same_codes(
    codes: int, apart: int, cut: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, ops = rows(codes), TensorOps()
    generator = torch.Generator().manual_seed(4)
    uniforms = torch.rand(200, len(weights), generator=generator) * (1 - 2.0**-22)
    with Pairs(apart, cut) as engine:
        total = ops.scan(weights)
    assert engine.products == 1 + (codes > 128)
    monkeypatch.setattr(ops, "scan", lambda _: total)  # the same every time
    drawn = torch.stack([ops.sample(weights, one) for one in uniforms])
    assert (total[:, 0] >= 0).all() and (total.diff(dim=-1) >= 0).all()
    # A sum rises at codes with a weight alone: nothing else can be drawn.
    assert not (total.diff(dim=-1) > 0)[weights[:, 1:] == 0].any()
    assert (weights.expand(200, -1, -1).gather(-1, drawn.unsqueeze(-1)) > 0).all()
    # The codes are those of exact sums, but where a draw falls within rounding of an edge.
    exact = weights.double().cumsum(-1)
    assert torch.allclose(total.double(), exact, rtol=codes * 2.0**-24, atol=0)
    bars = uniforms.double().unsqueeze(-1) * exact[:, -1:]
    want = (exact[:, :-1] <= bars).sum(-1)
    near = ((exact - bars).abs() <= codes * 2.0**-24 * exact[:, -1:]).any(-1)
    assert torch.equal(drawn[~near], want[~near])
    assert near.double().mean() < 0.5
