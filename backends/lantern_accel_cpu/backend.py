"""The CPU as a device: the reference operations, and what Linux tells about the machine."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.backend import Backend, DeviceFacts, KVCache, KVLayout, MemoryUse


class DeviceBackend(Backend):
    """The host processor; every other device is compared with it."""

    name = "cpu"
    version = "0.1.0"
    # Two rows keep a core busy already, and an image alone is the same whatever is made beside it.
    default_batch = 1

    def __init__(self, index: int, threads: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._threads_before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)

    # A head's keys as one matrix: batched matrix products in bfloat16 take a third of the time of
    # torch's attention kernel at the few rows of a step, which is made for long queries.

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        """Order caches by head."""
        return KVLayout(layers, rows, capacity, heads, head_dim, dtype, head_major=True)

    def address(self, kv: KVCache, slots: Tensor) -> Tensor:
        """Return indices of (row, slot, head), flat: ``[R * T * H]``."""
        layout = kv.layout
        rows = torch.arange(layout.rows, dtype=slots.dtype).view(-1, 1, 1)
        heads = torch.arange(layout.heads, dtype=slots.dtype)
        flat = (rows * layout.heads + heads) * layout.capacity + slots.unsqueeze(-1)
        return flat.reshape(-1)

    def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer at ``address``."""
        flat = kv.data[layer].flatten(1, 3)
        flat[0].index_copy_(0, address, k.reshape(-1, k.shape[-1]))
        flat[1].index_copy_(0, address, v.reshape(-1, v.shape[-1]))

    def commit(self, kv: KVCache, source: Tensor, target: Tensor) -> None:
        """Move entries of all layers from addresses ``source`` to ``target``."""
        flat = kv.data.flatten(2, 4).flatten(0, 1)
        flat.index_copy_(1, target, flat.index_select(1, source))

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's cache under ``mask [R, 1, T, L]``."""
        k, v = kv.data[layer].unbind(0)
        if q.dtype == torch.float32:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        else:
            scores = torch.matmul(q.transpose(1, 2) * q.shape[-1] ** -0.5, k.transpose(2, 3))
            out = torch.matmul((scores + mask).softmax(dim=-1), v)
        return out.transpose(1, 2)

    def rotary(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotations as complex numbers."""
        return torch.complex(cos, sin)

    def rotate(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Rotate adjacent pairs of ``x [R, T, ..., d]`` by one complex product, in float32."""
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)

    def facts(self) -> DeviceFacts:
        """Describe the processor and its memory."""
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=cpu_name(),
            torch=torch.__version__,
            architecture=platform.machine() or None,
            memory_bytes=_memory_bytes(),
            cores=_cores(),
            threads=torch.get_num_threads(),
            notes=(f"instruction set: {torch.backends.cpu.get_cpu_capability()}",),
        )

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first only where the processor has the instructions; elsewhere it is slow."""
        if computes_bfloat16():
            return (torch.bfloat16, torch.float32, torch.float16)
        return (torch.float32, torch.bfloat16, torch.float16)

    def synchronize(self) -> None:
        """Do nothing: a CPU operation has ended when it returns."""

    def memory(self) -> MemoryUse:
        """Read the resident memory of this process."""
        status = _read_proc("status")
        return MemoryUse(
            in_use=status.get("VmRSS"), peak=status.get("VmHWM"), limit=_memory_bytes()
        )

    def reset_peak_memory(self) -> None:
        """Ask Linux to start a new peak; elsewhere, or where that is forbidden, do nothing."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

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


def computes_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively, as far as torch can tell."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    # Private names, so any torch may lack them; then the answer is the safe one.
    tests = [getattr(torch.cpu, name, None) for name in names]
    return any(bool(test()) for test in tests if test is not None)


def _cores() -> int | None:
    # The cores this process may use, which in a container are fewer than the machine's.
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS or Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count()


def _memory_bytes() -> int | None:
    sizes = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # 'max' when the container sets no limit
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=None)


def _read_proc(name: str) -> dict[str, int]:
    """Read the sizes of a /proc/self file in bytes; empty on a system without one."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[key] = int(value.split()[0]) * 1024
    return sizes
