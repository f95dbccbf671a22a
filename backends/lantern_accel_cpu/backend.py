"""The CPU as a device: the reference operations, and what Linux tells about the machine."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lantern_accel.device import forks, host
from lantern_accel.device.backend import Backend, DeviceConditions, DeviceFacts, MemoryUse, Support
from lantern_accel.device.capture import Replay
from lantern_accel.device.kv_cache import KVCache, KVLayout
from lantern_accel.device.packed import Format, Weight
from lantern_accel.device.preferences import Preferences
from lantern_accel_cpu import heap
from lantern_accel_cpu.compile import CompiledReplay
from lantern_accel_cpu.linear import linear, pack, packs
from lantern_accel_cpu.training import TrainingOps


class DeviceBackend(Backend):
    """The host processor, which torch computes on; every other device is compared with it."""

    name = "cpu"
    version = "0.1.0"
    training_ops = TrainingOps()

    def __init__(self, index: int, threads: int | None = None, compile: str = "off") -> None:
        super().__init__(torch.device("cpu"))
        # Two rows keep a core busy already, and an image alone is the same whatever is made next to it.
        # A matrix unit multiplies 32 rows in the time of one, vectors four to sixteen: it is measured.
        # What libraries add to a process that decodes for the first time, next to tensors (measured on an
        # AVX-512 processor with torch 2.13): 25 to 30 MB of their code, which counts once it has run;
        # 0.55 MB for each shape of oneDNN's matmul in bfloat16, of which vanilla has 16 and
        # lantern++ 37; 10 to 20 MB free between tensors on the heap.
        # torch's own operators do not widen bfloat16 in registers.
        self.preferences = Preferences(
            default_batch=1, free_rows=None, runtime_bytes=60 * 10**6,
            operators=None if computes_bfloat16() else torch.float32,
        )  # fmt: skip
        self._compile = compile
        self.capture_asked = compile == "on"
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

    def pack(self, weight: Weight, form: Format | None = None, drafts: bool = False) -> Weight:
        """Return the weight in oneDNN's order where there is one."""
        if form is None and isinstance(weight, Tensor) and packs(weight):
            return pack(weight)
        return super().pack(weight, form, drafts)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, sums: bool = False
    ) -> Tensor:
        """Multiply by a weight that was packed, or by one that could not be."""
        out = linear(x, weight if isinstance(weight, Tensor) else weight.dense(x.dtype), bias)
        return out.float() if sums else out

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``.

        Batched matmuls in bfloat16 take a third of the time of torch's attention kernel at the
        few rows of a step, which is made for long queries.
        """
        k, v = kv.by_head(layer, mask.shape[-1])
        count, width = q.shape[1], q.shape[3]
        if torch.compiler.is_compiling() and count == 1:
            # The compiler would write the product of one row as a loop, ten times as slow.
            q = q.expand(-1, 2, -1, -1)
        scores = torch.matmul((q * width**-0.5).transpose(1, 2), k.transpose(2, 3))
        weights = (scores + mask).softmax(dim=-1)
        return torch.matmul(weights, v).transpose(1, 2)[:, :count]

    def rotary(self, cos: Tensor, sin: Tensor) -> object:
        """Return the rotations as complex numbers."""
        if torch.compiler.is_compiling():
            return super().rotary(cos, sin)
        return torch.complex(cos, sin)

    def rotate(self, x: Tensor, rotary: object) -> Tensor:
        """Rotate adjacent pairs of ``x [R, T, ..., d]`` by one complex product, in float32."""
        if not isinstance(rotary, Tensor):
            return super().rotate(x, rotary)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)

    def scan(self, weights: Tensor) -> Tensor:
        """Add one weight after the other: torch does so here in double, in one thread a row."""
        return weights.cumsum(-1)

    def facts(self) -> DeviceFacts:
        """Describe the processor and its memory."""
        quota = host.cpu_quota()
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=cpu_name(),
            torch=torch.__version__,
            architecture=platform.machine() or None,
            memory_bytes=host.memory_bytes(),
            generation=generation(),
            virtual="hypervisor" in _cpuinfo("flags").split() if _cpuinfo("flags") else None,
            cores=host.cores(),
            threads=torch.get_num_threads(),
            notes=(
                f"instruction set: {torch.backends.cpu.get_cpu_capability()}",
                "native kernels: none",
                *(() if quota is None else (f"quota of processor time: {quota:.4g} cores",)),
            ),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first where the processor multiplies it."""
        if computes_bfloat16():
            return (torch.bfloat16, torch.float32, torch.float16)
        return (torch.float32, torch.bfloat16, torch.float16)

    def support(self, capability: str) -> Support:
        """Steps are captured where they are compiled from the start."""
        if capability == "capture" and self._compile == "on":
            return Support(True, how="compiled")
        return super().support(capability)

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Compile the step where the option ``compile`` says so; else run it as it is.

        Prefill runs once an image and never repays its compiling.
        """
        if self._compile == "off" or name == "prefill":
            return Replay(step)
        return CompiledReplay(step, name, self._compile)

    def synchronize(self) -> None:
        """Do nothing: a CPU operation has ended when it returns."""

    def memory(self, new_peak: bool = False) -> MemoryUse:
        """Read the resident memory of this process, and what its container leaves it.

        Linux starts a new peak where that is not forbidden.
        """
        status = _read_proc("status")
        limit, left = host.memory_bytes(), host.memory_left()
        if left is not None and limit is not None:
            left = min(left, limit - status.get("VmRSS", 0))
        if new_peak:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        return MemoryUse(
            in_use=status.get("VmRSS"),
            peak=status.get("VmHWM"),
            limit=limit,
            free=left,
            definition="the resident memory of the whole process, libraries included",
        )

    def trim_memory(self) -> contextlib.AbstractContextManager[None]:
        """Let large tensors leave the process as soon as they go, where the heap is glibc's."""
        return heap.trim_memory()

    def conditions(self) -> DeviceConditions:
        """Read the clock of the first core, where the system tells it."""
        return DeviceConditions(clock_mhz=_clock_mhz())

    def after_fork(self) -> None:
        """Let torch compute on one thread: OpenMP would wait for its parent's for ever."""
        torch.set_num_threads(1)
        self._threads_before = 1

    def close(self) -> None:
        """Restore torch's thread count."""
        torch.set_num_threads(self._threads_before)


#: Units without bfloat16 products whose kernels read weights of 16 bits all the same, and what they do
#: with them: a plain step of LlamaGen-B's size took 0.58 (avx2) and 0.46 (avx512) of its time in float32.
BFLOAT16_UNITS = {"avx2": "multiplied as integers", "avx512": "widened in registers"}


#: Designs of server processors by maker, family and models, as Linux names them; a model that a
#: hypervisor invents is in none.
GENERATIONS = {
    ("AuthenticAMD", 23, range(0x30, 0x40)): "Zen 2",
    ("AuthenticAMD", 25, range(0x10)): "Zen 3",
    ("AuthenticAMD", 25, range(0x10, 0x20)): "Zen 4",
    ("AuthenticAMD", 25, range(0xA0, 0xB0)): "Zen 4c",
    ("AuthenticAMD", 26, range(0x20)): "Zen 5",
    ("GenuineIntel", 6, range(85, 86)): "Skylake or Cascade Lake",
    ("GenuineIntel", 6, range(106, 109)): "Ice Lake",
    ("GenuineIntel", 6, range(143, 144)): "Sapphire Rapids",
    ("GenuineIntel", 6, range(173, 175)): "Granite Rapids",
    ("GenuineIntel", 6, range(207, 208)): "Emerald Rapids",
}


def cpu_name() -> str:
    """Return the processor's model name as the system gives it."""
    name = " ".join(_cpuinfo("model name").split())
    return name or platform.processor() or platform.machine() or "unknown processor"


def generation() -> str | None:
    """Return the name of the processor's design; None where Linux does not tell it."""
    with contextlib.suppress(ValueError):
        maker, family = _cpuinfo("vendor_id"), int(_cpuinfo("cpu family"))
        model = int(_cpuinfo("model"))
        for (of, one, models), name in GENERATIONS.items():
            if (of, one) == (maker, family) and model in models:
                return name
    return None


def _cpuinfo(field: str) -> str:
    """Return a field of /proc/cpuinfo's first processor; empty on a system without it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == field and value.strip():
                return value.strip()
    return ""


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
    return float(clock) if (clock := _cpuinfo("cpu MHz")) else None


def _read_proc(name: str) -> dict[str, int]:
    """Read the sizes of a /proc/self file in bytes; empty on a system without one."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[key] = int(value.split()[0]) * 1024
    return sizes
