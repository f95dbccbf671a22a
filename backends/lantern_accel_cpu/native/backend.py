"""The CPU with native kernels: what has one is done by it, what has none as on any CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lantern_accel.device.backend import DeviceFacts
from lantern_accel.device.capture import Replay
from lantern_accel.device.kv_cache import KVCache, KVLayout
from lantern_accel.device.packed import Format, Weight
from lantern_accel.device.plan import (
    FusedStep,
    Refused,
    StepPlan,
)
from lantern_accel.nn.rounding import Rounded, Rounding
from lantern_accel_cpu import pages
from lantern_accel_cpu.backend import BFLOAT16_UNITS, DeviceBackend
from lantern_accel_cpu.native import races, sampling, steps, trunk
from lantern_accel_cpu.native.kernels import Kernels, Panels, real
from lantern_accel_cpu.native.library import describe_unit
from lantern_accel_cpu.native.rounded import RoundedPanels

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def _served(
    name: str, run: Callable[Concatenate[Kernels, _Given], _Made | None]
) -> Callable[Concatenate[NativeCpu, _Given], _Made]:
    """Return a method that calls a function of the kernels, and the reference's where that gives None.

    Kernels give int64 indices; where another dtype is used, the reference serves.
    """

    def call(self: NativeCpu, /, *given: _Given.args, **named: _Given.kwargs) -> _Made:
        if self.index == torch.int64:
            self.kernels.threads()
            out = run(self.kernels, *given, **named)
            if out is not None:
                return out
        reference: Callable[_Given, _Made] = getattr(super(NativeCpu, self), name)
        return reference(*given, **named)

    return call


class NativeCpu(DeviceBackend):
    """The host processor with native kernels, which no compiled step can look into."""

    def __init__(self, index: int, kernels: Kernels, threads: int | None = None) -> None:
        self.kernels = kernels
        super().__init__(index, threads)
        self.preferences = replace(
            self.preferences, skips_hidden=True, skips_finished_rows=True, reads_fewer_bits=True
        )

    def allocate(self, layout: KVLayout) -> KVCache:
        """Allocate a zeroed cache that keeps its addresses, and remembers native trunks over it."""
        here = self.device.type == "cpu"  # a certificate counts a step on shapes alone
        make = pages.zeros if here else partial(torch.zeros, device=self.device)
        keys, values = (
            tuple(make(layout.shape, dtype=layout.dtype) for _ in range(layout.layers))
            for _ in range(2)
        )
        return trunk.PlannedCache(layout, keys, values, layout.pieces(self.device, self.index))

    def address(self, kv: KVCache, slots: Tensor) -> Tensor:
        """Return the slots ``[R, T]`` themselves."""
        return slots.long().contiguous()

    def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer at ``address``."""
        if real(k) and k.dtype == kv.layout.dtype:
            self.kernels.write(kv, layer, address, k, v)
        else:
            super().write(kv, layer, super().address(kv, address), k, v)

    def pack(self, weight: Weight, form: Format | None = None, drafts: bool = False) -> Weight:
        """Put a weight in the kernels' order, quantized at once where it should be."""
        if isinstance(weight, Rounded):
            return RoundedPanels.of(weight, drafts) if type(weight.codes) is Tensor else weight
        packs = isinstance(weight, Tensor) and self.kernels.packs(weight)
        if form is None and packs:
            assert isinstance(weight, Tensor)
            return self.kernels.pack(weight)
        if not isinstance(form, Rounding) or form.floating:
            return super().pack(weight, form, drafts)
        if packs:
            assert isinstance(weight, Tensor)
            weight = self.kernels.pack(weight, words=False)
        if isinstance(weight, Panels):
            return self.kernels.in_fewer_bits(weight, form, drafts)
        return super().pack(weight, form, drafts)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, sums: bool = False
    ) -> Tensor:
        """Multiply by a weight that was packed, or by one that could not be."""
        if isinstance(weight, Panels | RoundedPanels):
            return self.kernels.linear(x, weight, bias, sums)
        return super().linear(x, weight, bias, sums)

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Keep a mask boolean for the kernels, which read visible slots only."""
        return visible

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``."""
        if mask.dtype == torch.bool:
            if real(q) and q.dtype == kv.layout.dtype:
                return self.kernels.attend(q, kv, layer, mask)
            mask = super().mask(mask, q.dtype)
        return super().attend(q, kv, layer, mask)

    rms_norm = _served("rms_norm", Kernels.rms_norm)

    def rotary(self, cos: Tensor, sin: Tensor) -> object:
        """Return cos and sin, which the kernels take as they are."""
        return cos, sin

    rotate_write = _served("rotate_write", Kernels.rotate_write)
    trunk = _served("trunk", trunk.run)
    swiglu = _served("swiglu", Kernels.swiglu)
    guide = _served("guide", sampling.guide)
    filter = _served("filter", sampling.filter)
    sample = _served("sample", sampling.sample)
    race = _served("race", races.race)
    perturb = _served("perturb", races.perturb)
    likeliest = _served("likeliest", sampling.likeliest)
    accept = _served("accept", sampling.accept)
    accept_invariant = _served("accept_invariant", races.accept)

    def best(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest values, of equal ones the earlier first, as native steps choose them."""
        ordered, places = values.sort(dim=-1, descending=True, stable=True)
        return ordered[..., :count], places[..., :count].to(self.index)

    def fused_step(self, plan: StepPlan) -> FusedStep | Refused:
        """Do a plan's step in a native call for each phase, where all that it has is native."""
        return steps.fused_step(self.kernels, self, plan)

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Run the step next to the kernels' threads: torch computes on this thread alone.

        What torch still computes there is small. On several threads it would gain little, and OpenMP's
        would go on waiting awake on the cores that the next native call needs: that made steps of more
        than eight tokens twice as slow on two cores.
        """

        def run() -> None:
            with self.kernels.alone():
                step()

        return Replay(run)

    def facts(self) -> DeviceFacts:
        """Describe the processor, its memory and the kernels."""
        found, library = super().facts(), self.kernels.library
        instructions, _, *more = found.notes
        own = [
            f"native kernels: {describe_unit(library.unit)}",
            *([library.note] if library.note else []),
        ]
        notes = (instructions, *own, *more)
        return found.model_copy(update={"threads": self.kernels.count(), "notes": notes})

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first where the processor multiplies it, or the kernels read it as fast."""
        able = super().compute_dtypes()
        if self.kernels.library.unit in BFLOAT16_UNITS:
            return (torch.bfloat16, *(one for one in able if one != torch.bfloat16))
        return able

    def after_fork(self) -> None:
        """Start threads of the kernels' own, as many as before; torch computes on one."""
        self.kernels.after_fork()
        super().after_fork()
