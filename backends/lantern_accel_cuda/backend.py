"""A GPU as a device: captured steps, caches by head, its clock and its meters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.backend import (
    Backend,
    Conditions,
    DeviceFacts,
    HostCopy,
    KVCache,
    KVLayout,
    MemoryUse,
    Replay,
    Stopwatch,
    Support,
)
from lantern_accel.device.sampling import Filter, triangle
from lantern_accel.errors import BackendError
from lantern_accel_cuda import attention, faults
from lantern_accel_cuda.copies import PinnedCopy
from lantern_accel_cuda.graphs import Recorder
from lantern_accel_cuda.handles import stream
from lantern_accel_cuda.meters import Card, EventStopwatch
from lantern_accel_cuda.options import CHOICES, Options
from lantern_accel_cuda.settings import Pinned


class DeviceBackend(Backend):
    """One GPU that torch drives as ``cuda``."""

    name = "cuda"
    version = "0.2.0"
    sums_in_place = True

    def __init__(self, index: int, options: Options | None = None) -> None:
        super().__init__(torch.device("cuda", index))
        self.options = options or Options()
        self.capture_asked = self.options.asked
        self.skips_hidden = self.options.attention == "triton"
        self._card = Card(index)
        self._cores = torch.cuda.get_device_properties(index).multi_processor_count
        self._recorder = Recorder(self.device, self.options.graph, self.options.compile)
        self._copies: torch.cuda.Stream | None = None
        self._pinned = Pinned()

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

    def linear_add(
        self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Add the product to the residual where it lies: elsewhere torch would copy it there first."""
        if bias is not None or torch.is_grad_enabled() or not residual.is_contiguous():
            return super().linear_add(x, weight, residual, bias)
        residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return residual

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Return bytes for the Triton kernel, else what is added to scores."""
        if self.options.attention == "triton":
            return visible.to(torch.int8)
        return super().mask(visible, dtype)

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``."""
        k, v = self.by_head(kv, layer, mask.shape[-1])
        if self.options.attention == "triton":
            from lantern_accel_cuda.kernels import tree_attention

            return tree_attention.attend(q, k, v, mask, self._cores)
        if self.options.attention == "matmul":
            return attention.matmul(q, k, v, mask)
        return attention.sdpa(q, k, v, mask)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention without a cache, by torch."""
        if mask is not None and mask.dtype == torch.int8:
            mask = mask.bool()
        return super().attend_dense(q, k, v, mask)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise in float32, return to the dtype of ``x``, then scale."""
        if self.options.kernels == "triton":
            from lantern_accel_cuda.kernels import fused

            return fused.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def rotary(self, cos: Tensor, sin: Tensor) -> Any:
        """Keep cos and sin as they are for the Triton kernel."""
        return (cos, sin) if self.options.kernels == "triton" else super().rotary(cos, sin)

    def rotate_write(
        self, qkv: Tensor, rotary: Any, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k, store k and v of a layer, return q."""
        if self.options.kernels == "triton":
            from lantern_accel_cuda.kernels import fused

            return fused.rotate_write(qkv, rotary, kv, layer, address)
        return super().rotate_write(qkv, rotary, kv, layer, address)

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x = [gate; up]``, ``[..., 2F]``."""
        if self.options.kernels == "triton":
            from lantern_accel_cuda.kernels import fused

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
        if self.options.kernels == "triton":
            from lantern_accel_cuda.kernels import sampling

            found = sampling.guide(logits, token, scale, image_scale, penalties)
            if found is not None:
                return found
        return super().guide(logits, token, scale, image_scale, penalties)

    def filter(self, logits: Tensor, given: Filter) -> Tensor:
        """Return the float32 probabilities ``[..., V]`` that a filter makes of logits; no sort."""
        if self.options.kernels == "triton":
            from lantern_accel_cuda.kernels import sampling

            found = sampling.filter(logits, given)
            if found is not None:
                return found
        return super().filter(logits, given)

    def running_sums(self, size: int, device: torch.device) -> Tensor | None:
        """Return what the reference's draws take; the Triton kernel takes nothing."""
        return None if self.options.kernels == "triton" else triangle(size, device)

    def draw(self, weights: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
        """Draw by inverse CDF: codes ``[...]`` from weights ``[..., V]``, uniforms ``[...]``."""
        if self.options.kernels == "triton":
            return self.draw_without_replacement(weights, uniform.unsqueeze(-1)).squeeze(-1)
        return super().draw(weights, uniform, sums)

    def draw_without_replacement(
        self, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None
    ) -> Tensor:
        """Draw ``K`` different codes ``[..., K]``, from weights ``[..., V]``, uniforms ``[..., K]``."""
        if self.options.kernels == "triton":
            from lantern_accel_cuda.kernels import sampling

            found = sampling.draw(weights, uniforms, self.index)
            if found is not None:
                return found
        return super().draw_without_replacement(weights, uniforms, sums)

    def accept(
        self,
        tree: Any,
        logits: Tensor,
        given: Filter,
        rule: Any,
        uniforms: Tensor,
        bonus_uniform: Tensor,
        masked: bool,
    ) -> tuple[Tensor, ...] | None:
        """Filter a tree's rows and walk down it in two kernels; None where they do not serve it."""
        if self.options.kernels != "triton":
            return None
        from lantern_accel_cuda.kernels import accept

        return accept.accept(tree, logits, given, rule, uniforms, bonus_uniform)

    def facts(self) -> DeviceFacts:
        """Describe the GPU, its driver, torch's CUDA and what its speed depends on now."""
        gpu = torch.cuda.get_device_properties(self.device)
        is_amd = torch.version.hip is not None
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
            readings=self._card.notes(),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first from Ampere on; older GPUs only emulate it, so float16 there."""
        if torch.version.hip is not None or torch.cuda.get_device_capability(self.device) >= (8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    def support(self, capability: str) -> Support:
        """Steps are recorded as CUDA graphs unless the user turned that off."""
        if capability == "capture":
            on = self.options.graph != "off"
            if not on:
                return Support(False, "backend 'cuda' was opened with graph=off")
            return Support(True, how="recorded")
        return super().support(capability)

    def checks(self) -> Mapping[str, Callable[[Any], Any]]:
        """Add what a GPU must show: no host read, no allocation, kernels that agree with torch."""
        from lantern_accel_cuda.checks import CHECKS

        return CHECKS

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Record ``step`` as a CUDA graph after a warm-up on a side stream.

        Raises NotCapturableError where the step waits for the host (it names the operator), and
        BackendError where memory runs out, where torch.compile fails, and where the GPU does.
        """
        return self._recorder.capture(step, name)

    def synchronize(self) -> None:
        """Wait for all streams of this GPU."""
        with faults.explained(self.device, "waiting for it"):
            torch.cuda.synchronize(self.device)

    def stopwatch(self) -> Stopwatch:
        """Measure between two events on the current stream, without the host's share."""
        return EventStopwatch(self.device)

    def explain(self, error: Exception) -> BackendError | None:
        """Say what an error of the GPU means and what to do."""
        return faults.explain(error, self.device, "decoding")

    def memory(self) -> MemoryUse:
        """Read what torch's allocator holds in tensors on this GPU, and what is left of it."""
        allocated = torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - allocated
        return MemoryUse(
            in_use=allocated,
            peak=torch.cuda.max_memory_allocated(self.device),
            limit=total,
            free=free + kept,
            definition="what torch's allocator holds in tensors; contexts and libraries are not in it",
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak of the allocator."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def conditions(self) -> Conditions:
        """Ask NVML for clocks, power, temperature and the other processes on this GPU."""
        return Conditions(**self._card.conditions())

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
        with contextlib.suppress(RuntimeError):  # a GPU that is lost has nothing to give back
            torch.cuda.empty_cache()
