"""A native window and its look-up of earlier passes, each instruction set against the reference."""

from __future__ import annotations

import pytest
import torch
from support import native
from torch import Tensor

from lantern_accel.decoding.logits import Draws
from lantern_accel.decoding.maximal_coupling import couple
from lantern_accel.decoding.row_cache import LOOKED_UP, RowCache
from lantern_accel.device.plan import Lookup
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel_cpu.native import windows
from lantern_accel_cpu.native.library import Library

pytestmark = native.needs_native
UNITS = native.units()


class Scanning(SamplingOps):
    """The reference, with the running sums that the CPU uses."""

    def scan(self, weights: Tensor) -> Tensor:
        return weights.cumsum(-1)


class Native(Scanning):
    """The two native operations, and nothing else of the device."""

    def __init__(self, library: Library) -> None:
        self.library, self.calls = library, 0

    def couple(self, *given):
        self.calls += 1
        return windows.couple(self.library, *given)

    def recall(self, *given):
        self.calls += 1
        return windows.recall(self.library, *given)


def laws(make: torch.Generator, *shape: int) -> Tensor:
    """Return distributions of which many codes have none."""
    weights = torch.rand(shape, generator=make) ** 4
    weights = torch.where(torch.rand(shape, generator=make) < 0.5, weights, 0.0)
    weights[..., -1] += 0.01
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("anew", [False, True])
def test_a_window_is_tested_as_the_reference_tests_it(unit: str, anew: bool) -> None:
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
        want = couple(x, p, q, tests, draws, anew=anew, drawing=Draws(Scanning()))
        got = couple(x, p, q, tests, draws, anew=anew, drawing=Draws(ops))
        assert torch.equal(got.tokens, want.tokens)
        assert torch.equal(got.count, want.count)
        counts |= set(want.count.tolist())
    assert ops.calls == 60 and len(counts) > 3


@pytest.mark.parametrize("unit", UNITS)
def test_the_look_up_finds_what_the_reference_finds(unit: str) -> None:
    ops = Native(native.kernels(unit).library)
    found = 0
    for seed in range(80):
        make = torch.Generator().manual_seed(seed)
        images, passes, vocab, image = 1 + seed % 2, 4, (6, 50)[seed % 2], 30
        length, wide = 3 + seed % 6, 3 + seed % 6 + seed % 3

        def codes(*shape: int, top: int = vocab, make: torch.Generator = make) -> Tensor:
            return torch.randint(0, min(top, 3), shape, generator=make)

        at, step = codes(images, top=3) + 4, torch.tensor([seed % 11])
        places = at.view(-1, 1, 1) + torch.arange(1, wide + 1) + codes(images, passes, 1) - 1
        probs = laws(make, images, passes, wide, vocab).bfloat16()
        keys, previous = places * vocab + codes(images, passes, wide), codes(images, passes, wide)
        if seed % 9 == 0:
            probs.zero_()
        p, q = laws(make, images, length, vocab), laws(make, images, length - 1, vocab)
        x, tokens = codes(images, length), codes(images, length)
        first = torch.randint(1, length + 1, (images,), generator=make)
        u = torch.rand(images, 2 * length, generator=make).clamp(max=1 - 2.0**-22)
        given = Lookup(
            at, step, probs, keys, previous, x, p, q, tokens, first, u[:, : length - 1],
            u[:, -length:], LOOKED_UP, image,
        )  # fmt: skip
        device = torch.device("cpu")
        (want, rows, where), (got, again, changed) = (
            RowCache(passes, length, image, vocab, device, Draws(one)).refine(given)
            for one in (Scanning(), ops)
        )
        assert torch.equal(got, want) and torch.equal(changed, where)
        here = where < image
        assert float((again - rows)[here].abs().sum()) < 1e-5
        found += int(here.sum())
    assert ops.calls == 80 and found > 60


def test_other_dtypes_go_the_references_way() -> None:
    make = torch.Generator().manual_seed(2)
    p, q = laws(make, 1, 3, 8), laws(make, 1, 2, 8)
    u = torch.rand(1, 5, generator=make)
    library = native.kernels(UNITS[0]).library
    short = torch.tensor([[7, 7]], dtype=torch.int32)
    assert windows.couple(library, short, p, q, u[:, :2], u[:, 2:], False) is None
    double = p.double()
    x = short.long()
    assert windows.couple(library, x, double, q, u[:, :2], u[:, 2:], False) is None
