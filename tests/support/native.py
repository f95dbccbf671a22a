"""What the tests of the native kernels share: the units that run here, and float64 references."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lantern_accel.device.kv_cache import KVCache, KVLayout
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel_cpu.native import build, library
from lantern_accel_cpu.native.kernels import Kernels, Panels
from lantern_accel_cpu.native.rounded import RoundedPanels

needs_native = pytest.mark.skipif(bool(build.missing()), reason=f"native: {build.missing()}")

#: Largest error of sums of values about 1 against float64, by dtype of what goes in and out.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}


def units() -> list[str]:
    """Return the instruction sets of this machine that the tests run."""
    family = build.family()
    if build.missing() or family is None:
        return []
    features = build._features()
    known = build.UNITS[family]
    fit = [n for n, unit in known.items() if not unit.needs or unit.needs <= (features or set())]
    return [name for name in fit if name != "amx" or not build.ask_for_tiles()]


def unit_cases(*without: str) -> list[object]:
    """Return the units as cases: this machine's best one, and in the long tier the others.

    A unit takes a compiler 20 seconds and more.
    """
    best, *others = [name for name in units() if name not in without] or [""]
    return [best, *(pytest.param(name, marks=pytest.mark.long) for name in others)]


def kernels(unit: str = "") -> Kernels:
    """Return the kernels of one instruction set, or the best; compiled where they are not."""
    before = os.environ.get(build.UNIT_VARIABLE)
    if unit:
        os.environ[build.UNIT_VARIABLE] = unit
    try:
        return Kernels(library.load())
    finally:
        os.environ.pop(build.UNIT_VARIABLE, None)
        if before is not None:
            os.environ[build.UNIT_VARIABLE] = before


#: How weights are kept; a copy's products have activations in bytes.
KINDS = ["full", *sorted(ROUNDINGS), *(f"{name} copy" for name in sorted(ROUNDINGS))]


def kept(kernels: Kernels, weight: Tensor, kind: str) -> Panels | RoundedPanels:
    """Return a weight as one of :data:`KINDS` is kept."""
    if kind == "full":
        return kernels.pack(weight)
    how, panels = ROUNDINGS[kind.split()[0]], kernels.pack(weight, words=False)
    return kernels.in_fewer_bits(panels, how, kind.endswith("copy"))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled_cache(
    layers: int, rows: int, capacity: int, heads: int, width: int, dtype: torch.dtype
) -> KVCache:
    """Return a head-major cache with random content."""
    kv = REFERENCE.allocate(KVLayout(layers, rows, capacity, heads, width, dtype, head_major=True))
    for seed, side in enumerate(kv.buffers):
        side.copy_(draw(9 + seed, *side.shape))
    return kv


def sides(kv: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values as views ``[R, H, L, d]``."""
    return kv.by_head(layer, kv.layout.capacity)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attend in float64: ``q [R, T, H, d]``, ``k, v [R, H, L, d]``, ``visible`` bool ``[R, 1, T, L]``."""
    scores = torch.einsum("rthd,rhld->rhtl", q.double(), k.double()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    values = v.double().masked_fill(~visible.any(2)[:, 0, None, :, None].expand_as(v), 0.0)
    return torch.einsum("rhtl,rhld->rthd", weights, values)
