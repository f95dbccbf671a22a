"""The CPU with native kernels: what has one is done by it, what has none as on any CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lantern_accel.device.backend import DeviceFacts
from lantern_accel.device.capture import Replay
from lantern_accel.device.kv_cache import KVCache, KVLayout, Pass
from lantern_accel.device.packed import Format, Weight
from lantern_accel.device.plan import (
    AcceptancePlan,
    DraftedTree,
    Filter,
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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise and scale in float32, at once."""
        if _native(x) and weight.dtype == x.dtype:
            return self.kernels.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def rotary(self, cos: Tensor, sin: Tensor) -> object:
        """Return cos and sin, which the kernels take as they are."""
        return cos, sin

    def rotate_write(
        self, qkv: Tensor, rotary: object, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k, store k and v of a layer, return q; at once."""
        if isinstance(rotary, tuple) and _native(qkv) and qkv.dtype == kv.layout.dtype:
            return self.kernels.rotate_write(qkv, rotary, kv, layer, address)
        return super().rotate_write(qkv, rotary, kv, layer, address)

    def trunk(
        self,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        taps: Sequence[int] = (),
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Run a stack of blocks: in one native call where there is one."""
        out = trunk.run(self.kernels, blocks, x, at, taps, norm)
        return out if out is not None else super().trunk(blocks, x, at, taps, norm)

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x = [gate; up]``, ``[..., 2F]``."""
        return self.kernels.swiglu(x) if _native(x) else super().swiglu(x)

    def guide(
        self,
        logits: Tensor,
        token: Tensor,
        scale: Tensor | None,
        image_scale: Tensor | float | None = None,
        penalties: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return guided logits ``[B, T, V]``, at once."""
        library = self.kernels.library
        out = sampling.guide(library, logits, token, scale, image_scale, penalties)
        if out is not None:
            return out
        return super().guide(logits, token, scale, image_scale, penalties)

    def filter(self, logits: Tensor, given: Filter, tables: object | None = None) -> Tensor:
        """Make probabilities of logits, without a sort."""
        self.kernels.threads()
        out = sampling.filter(self.kernels.library, logits, given)
        return out if out is not None else super().filter(logits, given)

    def sample(self, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None) -> Tensor:
        """Sample codes of the shape of ``uniforms`` from weights ``[..., V]``."""
        if self.index == torch.int64:
            alone = uniforms.dim() < weights.dim()
            given = uniforms.unsqueeze(-1) if alone else uniforms
            out = sampling.sample_codes(self.kernels.library, weights, given)
            if out is not None:
                return out.squeeze(-1) if alone else out
        return super().sample(weights, uniforms)

    def race(
        self, weights: Tensor, keys: Tensor, positions: Tensor, count: int | None = None
    ) -> Tensor:
        """Return the codes ``[B, T]`` whose weight over noise is largest, or the first ``count``."""
        self.kernels.threads()
        if self.index == torch.int64 and count is None:
            out = races.race(self.kernels.library, weights, keys, positions)
            if out is not None:
                return out
        return super().race(weights, keys, positions, count)

    def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Return weights over the noise of their place, ``[B, T, V]``."""
        self.kernels.threads()
        out = races.perturb(self.kernels.library, weights, keys, positions)
        return out if out is not None else super().perturb(weights, keys, positions)

    def likeliest(
        self, weights: Tensor, count: int, luck: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest codes, of equal ones the lower first."""
        if self.index == torch.int64:
            self.kernels.threads()
            out = sampling.likeliest(self.kernels.library, weights, count, luck)
            if out is not None:
                return out
        return super().likeliest(weights, count, luck)

    def best(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest values, of equal ones the earlier first, as native steps choose them."""
        ordered, places = values.sort(dim=-1, descending=True, stable=True)
        return ordered[..., :count], places[..., :count].to(self.index)

    def accept(
        self,
        tree: DraftedTree,
        logits: Tensor,
        given: Filter,
        rule: AcceptancePlan,
        uniforms: Tensor,
        bonus_uniform: Tensor,
        masked: bool,
    ) -> tuple[Tensor, ...] | None:
        """Walk down a tree in one native call, where the rule is one of the papers'."""
        self.kernels.threads()
        library = self.kernels.library
        return sampling.accept(library, tree, logits, given, rule, uniforms, bonus_uniform, masked)

    def accept_invariant(
        self, tree: DraftedTree, logits: Tensor, given: Filter, keys: Tensor, length: Tensor
    ) -> tuple[Tensor, ...] | None:
        """Walk down the tokens that noise chooses in one native call."""
        self.kernels.threads()
        return races.accept(self.kernels.library, tree, logits, given, keys, length)

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


def _native(x: Tensor) -> bool:
    return real(x) and not x.requires_grad
