"""A draft head in native calls: its parameters, as the kernels read them."""

from __future__ import annotations

from ctypes import Structure, pointer
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_accel.device.plan import GuessHead, StepPlan, WindowPlan
from lantern_accel_cpu.native import structures
from lantern_accel_cpu.native.kernels import DTYPES, Kernels, Panels, lies
from lantern_accel_cpu.native.plans import require

#: The parameters that are multiplied by, which kernels read in panels.
MATRICES = ("state", "seen", "mid", "head")


class Guessing(NamedTuple):
    """What kernels are given of a draft head, and what must outlive it.

    ``features`` float32 ``[B, T, D]``: where a pass leaves its guided states.
    """

    given: Structure
    features: Tensor
    held: tuple[object, ...]

    @property
    def address(self) -> object:
        return pointer(self.given)


def guessing(kernels: Kernels, plan: StepPlan) -> Guessing | None:
    """Describe the draft head of a plan's window; None where there is none.

    Raises Unserved where there is no kernel for it.
    """
    source, target, at = plan.source, plan.target, plan.sizes
    if not isinstance(source, WindowPlan) or source.head is None or target is None:
        return None
    head, feature, dtype = source.head, source.feature, target.cache.layout.dtype
    require(dtype in DTYPES and at.branches <= 2, f"a draft head reads {dtype} of more branches")
    tables = [head.codes, head.place, head.start, head.bias]
    tables += [getattr(head, name) for name in MATRICES]
    require(lies(torch.float32, *tables), "the draft head is not float32 in one piece on the CPU")
    assert feature is not None
    packed, bias = _pack_head(kernels, head, dtype)
    dim = feature.shape[1]
    features = torch.zeros(at.images, at.nodes, dim)
    given = structures.GuessHead(
        *(t.data_ptr() for t in (head.codes, head.place, head.start)),
        *(one.address for one in packed), bias.data_ptr(),
        feature.data_ptr(), features.data_ptr(), dim, head.mid.shape[1], head.mid.shape[0],
        len(head.start), head.grid, DTYPES[dtype],
    )  # fmt: skip
    return Guessing(given, features, (head, packed, bias, feature))


def _pack_head(
    kernels: Kernels, head: GuessHead, dtype: torch.dtype
) -> tuple[tuple[Panels, ...], Tensor]:
    """Return the matrices in panels and the bias, in a dtype; engines of one head share them."""
    key = (head.head.data_ptr(), dtype)
    if key not in kernels.heads:
        matrices = tuple(kernels.pack(getattr(head, name).to(dtype)) for name in MATRICES)
        kernels.heads[key] = matrices, head.bias.to(dtype), head
    matrices, bias, _ = kernels.heads[key]
    return matrices, bias
