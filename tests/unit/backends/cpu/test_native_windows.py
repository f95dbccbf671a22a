"""A native window, each instruction set against the reference."""

from __future__ import annotations

import pytest
import torch
from support import native
from torch import Tensor

from lantern_accel.decoding.logits import Draws
from lantern_accel.decoding.maximal_coupling import couple
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel_cpu.native import windows
from lantern_accel_cpu.native.library import Library

pytestmark = native.needs_native
UNITS = native.unit_cases()


class Scanning(SamplingOps):
    """The reference, with the running sums that the CPU uses."""

    def scan(self, weights: Tensor) -> Tensor:
        return weights.cumsum(-1)


class Native(Scanning):
    """The native test, and nothing else of the device."""

    def __init__(self, library: Library) -> None:
        self.library, self.calls = library, 0

    def couple(self, *given):
        self.calls += 1
        return windows.couple(self.library, *given)


def laws(make: torch.Generator, *shape: int) -> Tensor:
    """Return distributions of which many codes have none."""
    weights = torch.rand(shape, generator=make) ** 4
    weights = torch.where(torch.rand(shape, generator=make) < 0.5, weights, 0.0)
    weights[..., -1] += 0.01
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("unit", UNITS)
def test_a_window_is_tested_as_the_reference_tests_it(unit: str) -> None:
    ops = Native(native.kernels(unit).library)
    counts = set()
    for seed in range(60):
        make = torch.Generator().manual_seed(seed)
        images, length, vocab = 1 + seed % 3, 2 + seed % 7, (5, 33, 300)[seed % 3]
        p, q = laws(make, images, length, vocab), laws(make, images, length - 1, vocab)
        if seed % 4 == 0:
            q[0, 0] = p[0, 0]  # nothing is left
        if seed % 5 == 0:
            q = 0.3 * q + 0.7 * p[:, :-1]  # several are kept
        x = REFERENCE.draw(q, torch.rand(images, length - 1, generator=make))
        uniforms = torch.rand(images, 2 * length + 3, generator=make).clamp(max=1 - 2.0**-22)
        tests, draws = uniforms[:, : length - 1], uniforms[:, -length:]
        want = couple(x, p, q, tests, draws, drawing=Draws(Scanning()))
        got = couple(x, p, q, tests, draws, drawing=Draws(ops))
        assert torch.equal(got.tokens, want.tokens)
        assert torch.equal(got.count, want.count)
        counts |= set(want.count.tolist())
    assert ops.calls == 60 and len(counts) > 3


def test_other_dtypes_go_the_references_way() -> None:
    make = torch.Generator().manual_seed(2)
    p, q = laws(make, 1, 3, 8), laws(make, 1, 2, 8)
    u = torch.rand(1, 5, generator=make)
    library = native.kernels(UNITS[0]).library
    short = torch.tensor([[7, 7]], dtype=torch.int32)
    assert windows.couple(library, short, p, q, u[:, :2], u[:, 2:]) is None
    double = p.double()
    x = short.long()
    assert windows.couple(library, x, double, q, u[:, :2], u[:, 2:]) is None
