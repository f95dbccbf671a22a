"""The CPU as a device: the reference operations, and what Linux tells about the machine."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.device import forks, host
from lantern_accel.device.backend import (
    Backend,
    DeviceConditions,
    DeviceFacts,
    DTypePolicy,
    MemoryUse,
    Support,
)
from lantern_accel.device.capture import Replay
from lantern_accel.device.kv_cache import KVCache, KVLayout, Pass
from lantern_accel.device.plan import (
    AcceptanceRule,
    DraftedTree,
    Filter,
    FusedStep,
    StepPlan,
)
from lantern_accel.nn.rounding import Rounded, Rounding
from lantern_accel_cpu import cache, heap, pages
from lantern_accel_cpu.compile import CompiledReplay
from lantern_accel_cpu.linear import linear, pack, packs
from lantern_accel_cpu.native import races, sampling, steps, trunk, windows
from lantern_accel_cpu.native.kernels import Kernels, Panels, real
from lantern_accel_cpu.native.replay import NativeReplay
from lantern_accel_cpu.native.rounded import RoundedPanels
from lantern_accel_cpu.training import TrainingOps


class DeviceBackend(Backend):
    """The host processor; every other device is compared with it."""

    name = "cpu"
    version = "0.1.0"
    # Two rows keep a core busy already, and an image alone is the same whatever is made beside it.
    default_batch = 1
    # A matrix unit multiplies 32 rows in the time of one, vectors four to sixteen: it is measured.
    free_rows = None
    # What libraries add to a process that decodes for the first time, beside tensors (measured on an
    # AVX-512 processor with torch 2.13): 25 to 30 MB of their code, which counts once it has run;
    # 0.55 MB for each shape of oneDNN's matrix product in bfloat16, of which vanilla has 16 and lantern++
    # 37; 10 to 20 MB free between tensors on the heap.
    runtime_bytes = 60 * 10**6

    def __init__(
        self,
        index: int,
        threads: int | None = None,
        compile: str = "off",
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"))
        # A compiled step cannot look into native code, and has none: the two exclude each other.
        self.kernels = kernels
        self.skips_hidden = self.skips_blind = kernels is not None
        self._compile = compile if kernels is None else "off"
        self.capture_asked = self._compile == "on"
        self._threads_before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        if forks.inherited_torch():
            self.after_fork()

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        """Order caches by head: a head's keys are one matrix."""
        return KVLayout(layers, rows, capacity, heads, head_dim, dtype, head_major=True)

    def allocate(self, layout: KVLayout) -> KVCache:
        """Allocate a zeroed cache that keeps its addresses, and remembers native trunks over it."""
        if self.kernels is None:
            return super().allocate(layout)
        here = self.device.type == "cpu"  # a certificate counts a step on shapes alone
        make = pages.zeros if here else partial(torch.zeros, device=self.device)
        keys, values = (
            tuple(make(layout.shape, dtype=layout.dtype) for _ in range(layout.layers))
            for _ in range(2)
        )
        return trunk.PlannedCache(layout, keys, values, self.pieces(layout, self.index))

    def address(self, kv: KVCache, slots: Tensor) -> Tensor:
        """Return where slots ``[R, T]`` lie; for the native kernels, the slots themselves."""
        if self.kernels is None:
            return super().address(kv, slots)
        return slots.long().contiguous()

    def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer at ``address``."""
        if self.kernels is None:
            super().write(kv, layer, address, k, v)
        elif real(k) and k.dtype == kv.layout.dtype:
            self.kernels.write(kv, layer, address, k, v)
        else:
            super().write(kv, layer, super().address(kv, address), k, v)

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight in the native kernels' order, else in oneDNN's where there is one."""
        if self.kernels is not None and self.kernels.packs(weight):
            return self.kernels.pack(weight)
        return pack(weight) if packs(weight) else weight

    def unpack(self, weight: Tensor | Rounded | RoundedPanels) -> Tensor:
        """Return the matrix that a packed one was made of, as it is multiplied."""
        if isinstance(weight, RoundedPanels | Rounded):
            return weight.dense(torch.float32)
        if isinstance(weight, Panels):
            return weight.dense()
        return weight if weight.layout == torch.strided else weight.to_dense()

    def linear(
        self, x: Tensor, weight: Tensor | RoundedPanels, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply by a weight that was packed, or by one that could not be."""
        if isinstance(weight, Panels | RoundedPanels):
            assert self.kernels is not None
            return self.kernels.linear(x, weight, bias)
        return linear(x, weight, bias)

    def pack_rounded(self, weight: Rounded, drafts: bool = False) -> Rounded | RoundedPanels:
        """Return a matrix in fewer bits in the native kernels' order, where there are any."""
        fits = self.kernels is not None and type(weight.codes) is Tensor
        return RoundedPanels.of(weight, drafts) if fits else weight

    def pack_fewer(self, weight: Any, how: Rounding, drafts: bool = False) -> RoundedPanels | None:
        """Round a matrix and put it in order at once, where there are native kernels."""
        if self.kernels is None or how.floating:
            return None
        if not isinstance(weight, Panels):
            if not self.kernels.packs(weight):
                return None
            weight = self.kernels.pack(weight, words=False)
        return self.kernels.in_fewer_bits(weight, how, drafts)

    def logits(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Return the sums as the kernels have them."""
        if isinstance(weight, Panels | RoundedPanels):
            assert self.kernels is not None
            return self.kernels.linear(x, weight, bias, sums=True)
        return super().logits(x, weight, bias)

    def scan(self, weights: Tensor) -> Tensor:
        """Add one weight after the other: torch does so here in double, in one thread a row."""
        return weights.cumsum(-1)

    def guide(
        self,
        logits: Tensor,
        token: Tensor,
        scale: Tensor | None,
        image_scale: Tensor | float | None = None,
        penalties: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return guided logits ``[B, T, V]``, at once where there are native kernels."""
        out = None
        if self.kernels is not None:
            library = self.kernels.library
            out = sampling.guide(library, logits, token, scale, image_scale, penalties)
        return (
            out if out is not None else super().guide(logits, token, scale, image_scale, penalties)
        )

    def filter(self, logits: Tensor, given: Filter, tables: None = None) -> Tensor:
        """Make probabilities of logits, without a sort where there are native kernels."""
        out = None
        if self.kernels is not None:
            self.kernels.threads()
            out = sampling.filter(self.kernels.library, logits, given)
        return out if out is not None else super().filter(logits, given)

    def running_sums(self, size: int, device: torch.device) -> Tensor | None:
        """Return nothing: neither the native draw nor :meth:`scan` takes a table."""
        return None

    def draw(self, weights: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
        """Draw by inverse CDF: codes ``[...]`` from weights ``[..., V]``, uniforms ``[...]``."""
        out = None
        if self.kernels is not None and self.index == torch.int64:
            out = sampling.draw(self.kernels.library, weights, uniform.unsqueeze(-1))
        return out.squeeze(-1) if out is not None else super().draw(weights, uniform)

    def draw_without_replacement(
        self, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None
    ) -> Tensor:
        """Draw different codes ``[..., K]`` from weights ``[..., V]``, uniforms ``[..., K]``."""
        out = None
        if self.kernels is not None and self.index == torch.int64:
            out = sampling.draw(self.kernels.library, weights, uniforms)
        return out if out is not None else super().draw_without_replacement(weights, uniforms)

    def accept(
        self,
        tree: DraftedTree,
        logits: Tensor,
        given: Filter,
        rule: AcceptanceRule,
        uniforms: Tensor,
        bonus_uniform: Tensor,
        masked: bool,
    ) -> tuple[Tensor, ...] | None:
        """Walk down a tree in one native call, where the rule is one of the papers'."""
        if self.kernels is None:
            return None
        self.kernels.threads()
        library = self.kernels.library
        return sampling.accept(library, tree, logits, given, rule, uniforms, bonus_uniform, masked)

    def likeliest(
        self, weights: Tensor, count: int, luck: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest codes, of equal ones the lower first where there are native kernels."""
        out = None
        if self.kernels is not None and self.index == torch.int64:
            self.kernels.threads()
            out = sampling.likeliest(self.kernels.library, weights, count, luck)
        return out if out is not None else super().likeliest(weights, count, luck)

    def best(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest values, of equal ones the earlier first, as native steps choose them."""
        if self.kernels is None:
            return super().best(values, count)
        ordered, places = values.sort(dim=-1, descending=True, stable=True)
        return ordered[..., :count], places[..., :count].to(self.index)

    def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Return weights over the noise of their place, ``[B, T, V]``."""
        out = None
        if self.kernels is not None:
            self.kernels.threads()
            out = races.perturb(self.kernels.library, weights, keys, positions)
        return out if out is not None else super().perturb(weights, keys, positions)

    def race(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Return the codes ``[B, T]`` whose weight over noise is largest."""
        out = None
        if self.kernels is not None and self.index == torch.int64:
            self.kernels.threads()
            out = races.race(self.kernels.library, weights, keys, positions)
        return out if out is not None else super().race(weights, keys, positions)

    def accept_invariant(
        self, tree: DraftedTree, logits: Tensor, given: Filter, keys: Tensor, length: Tensor
    ) -> tuple[Tensor, ...] | None:
        """Walk down the tokens that noise chooses in one native call."""
        if self.kernels is None:
            return None
        self.kernels.threads()
        return races.accept(self.kernels.library, tree, logits, given, keys, length)

    def couple(
        self, x: Tensor, p: Tensor, q: Tensor, tests: Tensor, draws: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Test a window's drafts in one native call, which draws for those alone that are refused."""
        if self.kernels is None:
            return None
        self.kernels.threads()
        return windows.couple(self.kernels.library, x, p, q, tests, draws)

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Keep a mask boolean for the native kernels, which read visible slots only."""
        return visible if self.kernels is not None else super().mask(visible, dtype)

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``."""
        if mask.dtype == torch.bool:
            if self.kernels is not None and real(q) and q.dtype == kv.layout.dtype:
                return self.kernels.attend(q, kv, layer, mask)
            mask = super().mask(mask, q.dtype)
        return cache.attend(q, *self.by_head(kv, layer, mask.shape[-1]), mask)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise and scale in float32, at once where there are native kernels."""
        if self._native(x) and weight.dtype == x.dtype:
            assert self.kernels is not None
            return self.kernels.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def rotary(self, cos: Tensor, sin: Tensor) -> Any:
        """Return the rotations as complex numbers; native kernels take cos and sin as they are."""
        if self.kernels is not None:
            return cos, sin
        if torch.compiler.is_compiling():
            return super().rotary(cos, sin)
        return torch.complex(cos, sin)

    def rotate(self, x: Tensor, rotary: Any) -> Tensor:
        """Rotate adjacent pairs of ``x [R, T, ..., d]`` by one complex product, in float32."""
        if torch.compiler.is_compiling() or self.kernels is not None:
            return super().rotate(x, rotary)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)

    def rotate_write(
        self, qkv: Tensor, rotary: Any, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k, store k and v of a layer, return q; at once with native kernels."""
        if self._native(qkv) and qkv.dtype == kv.layout.dtype:
            assert self.kernels is not None
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
        out = None
        if self.kernels is not None:
            out = trunk.run(self.kernels, blocks, x, at, taps, norm)
        return out if out is not None else super().trunk(blocks, x, at, taps, norm)

    def fused_step(self, plan: StepPlan) -> FusedStep | None:
        """Do a plan's step in a native call for each phase, where all that it has is native."""
        return None if self.kernels is None else steps.fused_step(self.kernels, self, plan)

    def fused_guesses(self, plan: StepPlan) -> FusedStep | None:
        """Guess a window's drafts that no pass has seen in one native call."""
        return None if self.kernels is None else races.fresh_guesses(self.kernels, plan)

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x = [gate; up]``, ``[..., 2F]``."""
        if self._native(x):
            assert self.kernels is not None
            return self.kernels.swiglu(x)
        return super().swiglu(x)

    def _native(self, x: Tensor) -> bool:
        return self.kernels is not None and real(x) and not x.requires_grad

    @property
    def reads_fewer_bits(self) -> bool:  # type: ignore[override]  # here it depends on the compiler
        """Whether there are native products, which read codes and not whole weights."""
        return self.kernels is not None

    def facts(self) -> DeviceFacts:
        """Describe the processor and its memory."""
        quota, library = host.cpu_quota(), self.kernels.library if self.kernels else None
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=cpu_name(),
            torch=torch.__version__,
            architecture=platform.machine() or None,
            memory_bytes=host.memory_bytes(),
            cores=host.cores(),
            threads=self.kernels.count() if self.kernels else torch.get_num_threads(),
            notes=(
                f"instruction set: {torch.backends.cpu.get_cpu_capability()}",
                f"native kernels: {library.words if library else 'none'}",
                *((library.note,) if library and library.note else ()),
                *(() if quota is None else (f"quota of processor time: {quota:.4g} cores",)),
            ),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first where the processor multiplies it, or native kernels read it as fast."""
        reads = self.kernels is not None and self.kernels.library.unit in BFLOAT16_UNITS
        if computes_bfloat16() or reads:
            return (torch.bfloat16, torch.float32, torch.float16)
        return (torch.float32, torch.bfloat16, torch.float16)

    def support(self, capability: str) -> Support:
        """Steps are captured where they are compiled from the start."""
        if capability == "capture" and self._compile == "on":
            return Support(True, how="compiled")
        return super().support(capability)

    def dtypes(self, requested: str = "auto") -> DTypePolicy:
        """Choose the dtypes; torch's own operators do not widen bfloat16 in registers."""
        policy = super().dtypes(requested)
        own = requested == "auto" and not computes_bfloat16()
        return replace(policy, operators=torch.float32) if own else policy

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Compile the step where the option ``compile`` says so; else run it as it is.

        Prefill runs once an image and never repays its compiling.
        """
        if self.kernels is not None:
            return NativeReplay(step, self.kernels)
        if self._compile == "off" or name == "prefill":
            return Replay(step)
        return CompiledReplay(step, name, self._compile)

    def training_ops(self) -> TrainingOps:
        """Return the operations of a model in training."""
        return TrainingOps()

    def synchronize(self) -> None:
        """Do nothing: a CPU operation has ended when it returns."""

    def memory(self) -> MemoryUse:
        """Read the resident memory of this process, and what its container leaves it."""
        status = _read_proc("status")
        limit, left = host.memory_bytes(), host.memory_left()
        if left is not None and limit is not None:
            left = min(left, limit - status.get("VmRSS", 0))
        return MemoryUse(
            in_use=status.get("VmRSS"),
            peak=status.get("VmHWM"),
            limit=limit,
            free=left,
            definition="the resident memory of the whole process, libraries included",
        )

    def reset_peak_memory(self) -> None:
        """Ask Linux to start a new peak; elsewhere, or where that is forbidden, do nothing."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def trim_memory(self) -> contextlib.AbstractContextManager[None]:
        """Let large tensors leave the process as soon as they go, where the heap is glibc's."""
        return heap.trim_memory()

    def conditions(self) -> DeviceConditions:
        """Read the clock of the first core, where the system tells it."""
        return DeviceConditions(clock_mhz=_clock_mhz())

    def after_fork(self) -> None:
        """Let torch compute on one thread: OpenMP would wait for its parent's for ever.

        The native kernels start threads of their own, as many as before.
        """
        if self.kernels is not None:
            self.kernels.after_fork()
        torch.set_num_threads(1)
        self._threads_before = 1

    def close(self) -> None:
        """Restore torch's thread count."""
        torch.set_num_threads(self._threads_before)


def cpu_name() -> str:
    """Return the processor's model name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


#: Units without bfloat16 products whose kernels read weights of 16 bits all the same, and what they do
#: with them: a plain step of LlamaGen-B's size took 0.58 (avx2) and 0.46 (avx512) of its time in float32.
BFLOAT16_UNITS = {"avx2": "multiplied as whole numbers", "avx512": "widened in registers"}


def default_dtype(native: bool) -> str:
    """Say which dtype is the default here, and why; ``native``: with native kernels."""
    from lantern_accel_cpu.native import build

    if computes_bfloat16():
        return "bfloat16 by default (the processor multiplies it)"
    how = BFLOAT16_UNITS.get(build.chosen_units()[0]) if native and not build.missing() else None
    if how is not None:
        return f"bfloat16 by default (read in half the time, {how})"
    return "float32 by default (bfloat16 is slower here)"


def computes_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively, as far as torch can tell."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    # Private names, so any torch may lack them; then the answer is the safe one.
    tests = [getattr(torch.cpu, name, None) for name in names]
    return any(bool(test()) for test in tests if test is not None)


def _clock_mhz() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("cpu MHz"):
                return float(line.partition(":")[2])
    return None


def _read_proc(name: str) -> dict[str, int]:
    """Read the sizes of a /proc/self file in bytes; empty on a system without one."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[key] = int(value.split()[0]) * 1024
    return sizes
