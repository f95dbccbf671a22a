"""A GPU as a device: captured steps, caches by head, its clock and its meters."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from lantern_accel.device.backend import (
    Backend,
    Conformance,
    DeviceConditions,
    DeviceFacts,
    MemoryUse,
    Stopwatch,
    Support,
)
from lantern_accel.device.capture import HostCopy, Replay
from lantern_accel.device.kv_cache import KVCache, KVLayout, Pass
from lantern_accel.device.packed import Format, Weight
from lantern_accel.device.plan import (
    AcceptancePlan,
    DraftedTree,
    Filter,
    FusedStep,
    Refused,
    StepPlan,
    WindowPlan,
)
from lantern_accel.device.preferences import Preferences
from lantern_accel.device.sampling import Tables, triangle
from lantern_accel.errors import BackendError, LanternWarning
from lantern_accel.nn.rounding import Rounded
from lantern_accel_cuda import attention, faults
from lantern_accel_cuda.copies import PinnedCopy
from lantern_accel_cuda.graphs import Recorder
from lantern_accel_cuda.handles import stream
from lantern_accel_cuda.meters import Card, EventStopwatch, reserve
from lantern_accel_cuda.options import (
    CHOICES,
    EVERY_STEP,
    RESIDUALS,
    TENSOR_CORES,
    Options,
    check_name,
    has_triton,
)
from lantern_accel_cuda.settings import Pinned
from lantern_accel_cuda.trust import PASSED, Trust, source_digest

if has_triton():
    from lantern_accel_cuda import agreement, choosing, first_use, layers, steps
    from lantern_accel_cuda.agreement import Site
    from lantern_accel_cuda.choosing import Choices
    from lantern_accel_cuda.kernels import (
        accept,
        few,
        fused,
        race,
        rounded,
        sampling,
        tiles,
        tree_attention,
        trivial,
    )
    from lantern_accel_cuda.kernels.rounded import Columns

#: What a process of the checks of first use runs.
PROGRAM = "from lantern_accel_cuda.backend import check_kernels; check_kernels()"


class DeviceBackend(Backend):
    """One GPU that torch drives as ``cuda``."""

    name = "cuda"
    version = "0.2.0"

    def __init__(self, index: int, options: Options | None = None) -> None:
        super().__init__(torch.device("cuda", index))
        self.options = options or Options()
        self.capture_asked = self.options.asked
        self._card = Card(index)
        self._cores = torch.cuda.get_device_properties(index).multi_processor_count
        self._recorder = Recorder(self.device, self.options.graph)
        self._copies: torch.cuda.Stream | None = None
        self._pinned = Pinned()

    @property
    def site(self) -> Site:
        """Where this backend's kernels run."""
        return Site(self.device, self._cores, self.compute_dtypes(), self.index)

    def uses(
        self, kernel: str, dtype: torch.dtype | None = None, rule: AcceptancePlan | None = None
    ) -> bool:
        """Return whether a Triton kernel serves: wanted, there, and agreeing with the reference here.

        ``dtype``: of the numbers that it is for; None: the one that models have here. ``rule``: of a walk
        down a tree.
        """
        if not self.options.fused:
            return False
        if kernel in TENSOR_CORES and not self._has_tensor_cores:
            return False
        by = (f"{rule.kind}, {rule.residual}",) if rule is not None else ()
        return self.trust(check_name(kernel, dtype or self.compute_dtypes()[0], *by))

    @cached_property
    def _has_tensor_cores(self) -> bool:
        """Whether Triton has instructions of this GPU's tensor cores; says so once where it has none."""
        capability = torch.cuda.get_device_capability(self.device)
        if torch.version.hip is not None or capability >= (8, 0):
            return True
        warnings.warn(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, and Triton uses tensor "
            f"cores from 8.0 on: torch's operators serve in place of {', '.join(sorted(TENSOR_CORES))}",
            LanternWarning,
            stacklevel=4,
        )
        return False

    @cached_property
    def trust(self) -> Trust:
        """What is known of this GPU's kernels."""
        return self.trusting()

    def trusting(self, folder: Path | None = None) -> Trust:
        """Return what is known of this GPU's kernels, kept in ``folder``; None: the cache's."""

        def elsewhere(names: list[str], settled: Callable[[str], bool]) -> None:
            free = torch.cuda.mem_get_info(self.device)[0]
            count = 0 if self._card.exclusive() else first_use.processes(free)
            if count and (path := made.kept.path) is not None:
                start = partial(
                    first_use.start, self.device.index or 0, folder=path.parent, program=PROGRAM
                )
                first_use.run(names, settled, count, start, path.with_suffix(".checking"))

        ready = partial(trivial.run, self.device)
        checks = agreement.checks_of(self.site)
        made = Trust(self._key(), checks, folder, ready, self.together, elsewhere)
        return made

    def together(self, check: str) -> list[str]:
        """Return the checks that run with one: all that a plain step of any model asks for."""
        name, _, dtype = check.partition(" in ")
        if name not in EVERY_STEP:
            return [check]
        wanted = getattr(torch, dtype) if dtype else self.compute_dtypes()[0]
        unused = set() if self._has_tensor_cores else TENSOR_CORES
        unused = unused if wanted in few.DTYPES else unused | {"few"}
        return [check_name(one, wanted) for one in EVERY_STEP if one not in unused]

    def _key(self) -> dict[str, str]:
        """Return what is known of kernels holds for: card, driver, versions, source."""
        import triton

        gpu = torch.cuda.get_device_properties(self.device)
        return {
            "backend": f"{self.name} {self.version}",
            "card": f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}",
            "driver": self._card.driver() or "unknown",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kernels": source_digest(),
        }

    def shape_of(self, stage: str, weight: Tensor, rows: int) -> int | None:
        """Return the shape in which a Triton kernel does a stage of few rows; None: torch's product does.

        ``stage``: ``rotate``, ``gate``, ``add`` or ``sums``, of :mod:`.layers`. Measured at first use;
        not with ``preset=exact``, where one shape serves all.
        """
        if not self.uses("few", weight.dtype):
            return None
        return self.choices(stage, weight.shape[0], weight.shape[1], weight.dtype, rows)

    @cached_property
    def choices(self) -> Choices:
        """What serves each product of few rows here."""
        exact = self.options.preset == "exact"
        return Choices(
            self._key(), partial(choosing.time_stage, self.site, self._recorder, not exact), exact
        )

    def serves_few(self, x: Tensor) -> bool:
        """Return whether the kernels of few rows serve ``x [R, T, D]``, with those between them."""
        if not self.options.fused:
            return False
        if x.dtype not in few.DTYPES or x.shape[0] * x.shape[1] > few.MOST_ROWS or x.shape[2] % 16:
            return False
        needed = ("few", "attend", "rms_norm", "swiglu", "rotate_write")
        if absent := [name for name in needed if not self.uses(name, x.dtype)]:
            if self.options.preset == "exact":
                raise BackendError(
                    f"preset=exact needs the kernel {absent[0]!r}, which does not serve on this GPU; "
                    "give --option preset=fast"
                )
            return False
        return True

    @cached_property
    def preferences(self) -> Preferences:  # type: ignore[override]  # here it depends on the kernels
        """Caches are looked at whole, and quantized weights are read, where the kernels serve."""
        return KernelPreferences(self.uses)

    def acquire(self) -> None:
        """Use the GPU once: a busy one, or one without kernels, fails here and not in a model."""
        torch.zeros(8, device=self.device).add_(1)
        torch.cuda.synchronize(self.device)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase for Nsight; with ``graph=phases`` it becomes a graph of its own."""
        if self.listener is not None or torch.compiler.is_compiling():
            return super().phase(name)
        return self._recorder.phase(name)

    def host_copy(self, source: Tensor) -> HostCopy:
        """Read ``source`` through pinned memory, a step late."""
        if self._copies is None:
            self._copies = stream(self.device, "copy")
        return PinnedCopy(source, self._copies)

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        """Order caches by head, padded."""
        return attention.layout(layers, rows, capacity, heads, head_dim, dtype)

    def pack(self, weight: Weight, form: Format | None = None, drafts: bool = False) -> Weight:
        """Put codes in the Triton kernel's order; activations stay as they are for a copy's too."""
        if not isinstance(weight, Rounded) or not self.uses("rounded"):
            return super().pack(weight, form, drafts)
        return rounded.Columns.of(weight)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, sums: bool = False
    ) -> Tensor:
        """Multiply by a packed weight; sums stay in float32 in Triton, and where torch's product can."""
        if isinstance(weight, Rounded):
            return super().linear(x, weight, bias, sums)
        if not isinstance(weight, Tensor):
            return self._by_codes(x, cast("Columns", weight), bias, sums)
        if not sums or x.dtype == torch.float32 or torch.is_grad_enabled() or not self._leaves_sums:
            return super().linear(x, weight, bias, sums)
        flat = x.reshape(-1, x.shape[-1])
        if bias is None and weight.is_contiguous() and self.serves_few(flat.unsqueeze(0)):
            return layers.sums(x, weight, self.shape_of("sums", weight, len(flat)), self._cores)
        out = torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def _by_codes(self, x: Tensor, weight: Columns, bias: Tensor | None, sums: bool) -> Tensor:
        """Multiply by what :meth:`pack` made of codes: few rows by one kernel, tens by another."""
        many = rounded.ROWS < x.numel() // x.shape[-1] <= rounded.MOST_ROWS
        tiled = many and x.dtype in tiles.DTYPES and self.uses("tiles", x.dtype)
        return rounded.multiply(x, weight, bias, self._cores, sums, tiled)

    def linear_add(
        self, x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Add the product to the residual where it lies: elsewhere torch would copy it there first."""
        given = isinstance(weight, Tensor) and bias is None and not torch.is_grad_enabled()
        if not given or not residual.is_contiguous():
            return super().linear_add(x, weight, residual, bias)
        assert isinstance(weight, Tensor)
        residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return residual

    @cached_property
    def _leaves_sums(self) -> bool:
        """Whether a product of torch's (2.8 and newer) gives its sums in float32 here; it tries one."""
        one = torch.zeros(16, 16, dtype=self.compute_dtypes()[0], device=self.device)
        try:
            return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
        except (TypeError, RuntimeError):
            return False

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Return bytes for the Triton kernel, else what is added to scores."""
        if self.uses("attend", dtype):
            return visible.to(torch.int8)
        return super().mask(visible, dtype)

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``."""
        k, v = kv.by_head(layer, mask.shape[-1])
        if mask.dtype == torch.int8:
            return tree_attention.attend(q, k, v, mask, self._cores)
        return attention.sdpa(q, k, v, mask)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention without a cache, by torch."""
        if mask is not None and mask.dtype == torch.int8:
            mask = mask.bool()
        return super().attend_dense(q, k, v, mask)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise in float32, return to the dtype of ``x``, then scale."""
        if self.uses("rms_norm", x.dtype):
            return fused.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def rotary(self, cos: Tensor, sin: Tensor) -> object:
        """Keep cos and sin as they are for the Triton kernel."""
        return (cos, sin) if self.uses("rotate_write") else super().rotary(cos, sin)

    def rotate_write(
        self, qkv: Tensor, rotary: object, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k, store k and v of a layer, return q."""
        if isinstance(rotary, tuple) and self.uses("rotate_write", qkv.dtype):
            return fused.rotate_write(qkv, rotary, kv, layer, address)
        return super().rotate_write(qkv, rotary, kv, layer, address)

    def trunk(
        self,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        taps: Sequence[int] = (),
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Run a stack of blocks: on few rows in five kernels a layer."""
        out = None
        if self.serves_few(x):
            out = layers.run(self, self._cores, blocks, x, at, taps, norm)
        return out if out is not None else super().trunk(blocks, x, at, taps, norm)

    def fused_step(self, plan: StepPlan) -> FusedStep | Refused:
        """Do a whole step of a plain model, or what follows its pass: without drafts, or in windows."""
        # Asked in this order: a plan without a kernel checks none.
        if not self.options.fused:
            return Refused("the option fused=off")
        if why := steps.explain_refusal(plan):
            return Refused(why)
        needed, dtype = ["advance"], None
        if plan.target is not None:
            needed += ["enter", "attend", "rms_norm", "swiglu", "rotate_write"]
            if isinstance(plan.source, WindowPlan) and plan.source.head is not None:
                needed.append("guess")
            dtype = plan.target.cache.layout.dtype
        missing = [name for name in needed if not self.uses(name, dtype)]
        if missing:
            return Refused(f"the kernel {missing[0]} does not serve here")
        return steps.fused_step(self, plan, self._cores)

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x = [gate; up]``, ``[..., 2F]``."""
        if self.uses("swiglu", x.dtype):
            return fused.swiglu(x)
        return super().swiglu(x)

    def guide(
        self,
        logits: Tensor,
        token: Tensor,
        scale: Tensor | None,
        image_scale: Tensor | float | None = None,
        penalties: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return guided logits ``[B, T, V]`` from float32 rows ``[R, T, V]``, in one kernel."""
        if self.uses("guide"):
            found = sampling.guide(logits, token, scale, image_scale, penalties)
            if found is not None:
                return found
        return super().guide(logits, token, scale, image_scale, penalties)

    def tables(self, size: int, device: torch.device) -> Tables:
        """Return what the reference's draws take; the Triton kernel takes nothing."""
        return Tables() if self.uses("draw") else Tables(triangle(size, device))

    def filter(self, logits: Tensor, given: Filter, tables: object | None = None) -> Tensor:
        """Return the float32 probabilities ``[..., V]`` that a filter makes of logits; no sort."""
        if self.uses("filter"):
            found = sampling.filter(logits, given)
            if found is not None:
                return found
        return super().filter(logits, given)

    def sample(self, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None) -> Tensor:
        """Draw by inverse CDF, codes of the shape of ``uniforms`` from weights ``[..., V]``."""
        if self.uses("draw"):
            alone = uniforms.dim() < weights.dim()
            found = sampling.sample_codes(
                weights, uniforms.unsqueeze(-1) if alone else uniforms, self.index
            )
            if found is not None:
                return found.squeeze(-1) if alone else found
        return super().sample(weights, uniforms, sums)

    def race(
        self, weights: Tensor, keys: Tensor, positions: Tensor, count: int | None = None
    ) -> Tensor:
        """Draw codes ``[B, T]`` or ``[B, T, count]`` by position-keyed noise, in two kernels."""
        if self.uses("race"):
            found = race.race(weights, keys, positions, count or 1, self.index)
            if found is not None:
                return found.squeeze(-1) if count is None else found
        return super().race(weights, keys, positions, count)

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
        """Filter a tree's rows and walk down it in two kernels; None where they do not serve it."""
        if not self.options.fused or rule.residual not in RESIDUALS or rule.budget is not None:
            return None
        known = rule.kind in accept.KINDS and self.uses("accept", rule=rule)
        if not (known and self.uses("filter")):
            return None
        return accept.accept(tree, logits, given, rule, uniforms, bonus_uniform)

    def facts(self) -> DeviceFacts:
        """Describe the GPU, its driver, torch's CUDA and the options: what stays while it is open."""
        gpu = torch.cuda.get_device_properties(self.device)
        is_amd = torch.version.hip is not None
        # Choices alone: measurements are kept for these, and not for what changes with the moment.
        chosen = ", ".join(f"{name}={getattr(self.options, name)}" for name in CHOICES)
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=gpu.name,
            torch=torch.__version__,
            vendor="AMD" if is_amd else "NVIDIA",
            architecture=f"compute capability {gpu.major}.{gpu.minor}",
            memory_bytes=gpu.total_memory,
            cores=gpu.multi_processor_count,
            driver=self._card.driver(),
            sdk=f"ROCm {torch.version.hip}" if is_amd else f"CUDA {torch.version.cuda}",
            notes=(chosen,),
            readings=(*self._card.notes(), *self._describe_stored()),
        )

    def _describe_stored(self) -> list[str]:
        """Return what is kept of this GPU's kernels, in lines: their checks, and products' times."""
        if not (self.options.fused and isinstance(self.trust, Trust)):
            return []
        checks = self.trust.kept.read()
        out = [f"{name} ({said})" for name, said in sorted(checks.items()) if said != PASSED]
        head = f"kernels: {len(checks) - len(out)} agree, left out: {', '.join(out) or 'none'}"
        products = [f"ms of {name}: {times}" for name, times in self.choices.kept.read().items()]
        return [head, *products] if checks else []

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first from Ampere on; older GPUs only emulate it, so float16 there."""
        if torch.version.hip is not None or torch.cuda.get_device_capability(self.device) >= (8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    def support(self, capability: str) -> Support:
        """Steps are recorded as CUDA graphs unless the user turned that off."""
        if capability == "capture":
            if self.options.graph == "off":
                return Support(False, "backend 'cuda' was opened with graph=off")
            if self._recorder.failure:
                return Support(False, f"a capture failed before ({self._recorder.failure})")
            return Support(True, how="recorded")
        return super().support(capability)

    def conformance(self) -> Conformance:
        """Add what a GPU must show: no host read, no allocation, kernels that agree with torch."""
        from lantern_accel_cuda.checks import CHECKS

        return Conformance(checks=CHECKS, apart=frozenset({"gpu"}))

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Record ``step`` as a CUDA graph after a warm-up on a side stream.

        Raises NotCapturableError where the step waits for the host (it names the operator), where the
        driver refuses, and after either; BackendError where memory runs out and where the GPU is lost.
        """
        return self._recorder.capture(step, name)

    def synchronize(self) -> None:
        """Wait for all streams of this GPU."""
        with faults.explain_errors(self.device, "waiting for it"):
            torch.cuda.synchronize(self.device)

    def stopwatch(self) -> Stopwatch:
        """Measure between two events on the current stream, without the host's share."""
        return EventStopwatch(self.device)

    def explain(self, error: Exception) -> BackendError | None:
        """Say what an error of the GPU means and what to do."""
        return faults.explain(error, self.device, "decoding")

    def memory(self, new_peak: bool = False) -> MemoryUse:
        """Read what torch's allocator holds in tensors on this GPU, and what is left of it."""
        allocated = torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - allocated
        peak = torch.cuda.max_memory_allocated(self.device)
        if new_peak:
            torch.cuda.reset_peak_memory_stats(self.device)
        return MemoryUse(
            in_use=allocated,
            peak=peak,
            limit=total,
            free=max(free + kept - reserve(), 0),
            definition="what torch's allocator holds in tensors; contexts and libraries are not in it",
        )

    def conditions(self) -> DeviceConditions:
        """Ask NVML for clocks, power, temperature and the other processes on this GPU.

        The memory's clock is that of a working GPU, read once; the rest is of now.
        """
        found = self._card.conditions()
        if (busy := self._memory_clock) is not None:
            found["memory_clock_mhz"] = busy
        return DeviceConditions(**found)

    @cached_property
    def _memory_clock(self) -> float | None:
        return self._card.memory_clock(self.device)

    def counters(self) -> dict[str, int]:
        """Read the allocator's retries and errors, and bytes that captures left behind; none may rise."""
        stats = torch.cuda.memory_stats(self.device)
        found = {name: int(stats.get(name, 0)) for name in ("num_alloc_retries", "num_ooms")}
        return {**found, "graph_bytes_kept": self._recorder.bytes_kept}

    def energy_mj(self) -> int | None:
        """Read the GPU's energy meter, if nvidia-ml-py is installed and the GPU has one."""
        return self._card.energy_mj()

    def close(self) -> None:
        """Release every recording, and let the allocator give back what it keeps."""
        self._recorder.close()
        self._pinned.release()
        self._copies = None
        if self._recorder.failure:  # torch's allocator would stop at the capture that never ended
            return
        with contextlib.suppress(RuntimeError):  # a GPU that is lost has nothing to give back
            torch.cuda.empty_cache()


class KernelPreferences(Preferences):
    """Preferences of which two depend on kernels; the one that is asked for has its kernel checked."""

    sums_in_place = True
    _uses: Callable[[str], bool]

    def __init__(self, uses: Callable[[str], bool]) -> None:
        object.__setattr__(self, "_uses", uses)

    @property
    def reads_fewer_bits(self) -> bool:
        """Whether the kernel of products with quantized weights serves."""
        return self._uses("rounded")

    @property
    def skips_hidden(self) -> bool:
        """Whether the kernel of attention serves."""
        return self._uses("attend")


def check_kernels() -> None:
    """Check the kernels that the command line names, as a program of its own."""
    index, folder, *kernels = sys.argv[1:]
    try:
        backend = DeviceBackend(int(index))
        backend.acquire()
    except (RuntimeError, AssertionError):  # the latter of a torch without CUDA
        sys.exit(first_use.NOT_OPENED)
    backend.trusting(Path(folder)).check_here(kernels)
