"""Siblings of a window's first drafts in native calls: their buffers, as the kernels read them."""

from __future__ import annotations

from ctypes import pointer
from typing import NamedTuple

import torch

from lantern_accel.device.plan import StepPlan, Window
from lantern_accel_cpu.native import library
from lantern_accel_cpu.native.kernels import lies


class SiblingDrafts(NamedTuple):
    """What kernels are given of siblings, and what must outlive it."""

    given: library.Siblings
    held: tuple[object, ...]

    @property
    def address(self) -> object:
        return pointer(self.given)


def sibling_drafts(plan: StepPlan) -> SiblingDrafts | None:
    """Describe the siblings of a plan's window; None where there are none, or tensors without data."""
    source = plan.source
    if not isinstance(source, Window) or not source.siblings:
        return None
    if not lies(torch.int64, plan.buffers.tokens):
        return None
    beside = [d for d, count in enumerate(source.siblings) for _ in range(count)]
    numbers = [torch.tensor(one, dtype=torch.int32) for one in (source.siblings, beside)]
    codes = torch.zeros(plan.sizes.images, len(beside), dtype=torch.int64)
    held = (*numbers, codes)
    given = library.Siblings(
        *(t.data_ptr() for t in held), len(source.siblings), len(beside), *source.sibling_shares
    )
    return SiblingDrafts(given, held)
