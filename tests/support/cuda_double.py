"""A double of torch's CUDA API on CPU tensors, to run the backend's own code without a GPU.

A captured graph is a tape of operators on fixed memory, as on a GPU: capturing leaves the buffers as
they were, replaying runs the tape and no Python, and what a stream cannot record is refused. Nothing
measured here says anything about a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

REFUSED = "CUDA error: operation not permitted when stream is capturing"
ENDED = "CUDA error: operation failed due to a previous error during capture"
DIED = "CUDA error: the driver ran into an internal fault"
WAITS = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")
}


class _Tape(TorchDispatchMode):
    """Records operators; undoes at the end what they did to memory that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.nbytes = 0
        self._own: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.broken = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in WAITS:
            self.broken = True
            raise RuntimeError(REFUSED)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tree_flatten(written)[0]:
            where = tensor.untyped_storage().data_ptr()
            if where not in self._own and where not in self._before:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self._before[where] = (whole, whole.clone())
        out = func(*args, **kwargs)
        outs = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        inputs = {
            one.untyped_storage().data_ptr()
            for one in tree_flatten((args, kwargs))[0]
            if isinstance(one, Tensor)
        }
        fresh = [one for one in outs if one.untyped_storage().data_ptr() not in inputs]
        for one in fresh:
            self._own.add(one.untyped_storage().data_ptr())
            self.nbytes += one.untyped_storage().nbytes()
        self.entries.append((func, args, kwargs, fresh))
        return out

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)

    def run(self) -> None:
        for func, args, kwargs, fresh in self.entries:
            again = tree_flatten(func(*args, **kwargs))[0]
            made = [one for one in again if isinstance(one, Tensor)]
            if fresh:
                for old, new in zip(fresh, made, strict=True):
                    old.copy_(new)


class _NoWaiting(TorchDispatchMode):
    """What ``set_sync_debug_mode("error")`` does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


class Graph:
    def __init__(self, double: CudaDouble) -> None:
        self._double = double
        self._tape: _Tape | None = None
        self._pool: Any = None
        self.was_reset = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._double.alive()
        assert self._double.capturing is None, "one capture at a time"
        assert not self._double.poisoned, "captures after one that failed"
        assert self._double.current.side, "a capture on the default stream is illegal"
        self._pool = pool
        self._double.allocated += self._double.bookkeeping
        self._double.log(f"capture_begin {capture_error_mode}")
        self._double.capturing = self
        self._tape = _Tape()
        self._tape.__enter__()

    def capture_end(self) -> None:
        assert self._tape is not None
        self._tape.__exit__(None, None, None)
        self._tape.undo()
        self._double.capturing = None
        self._double.log("capture_end")
        if self._tape.broken or self._double.refuses == "capture_end":
            # As torch does: the pool's allocation is never ended.
            self._double.poisoned = True
            raise RuntimeError(ENDED if self._tape.broken else DIED)
        pools = self._double.pools
        grown = max(self._tape.nbytes - pools.get(self._pool, 0), 0)
        pools[self._pool] = pools.get(self._pool, 0) + grown

    def replay(self) -> None:
        assert self._tape is not None and not self.was_reset
        self._double.alive()
        self._double.allocations += self._double.allocates_in_replay
        self._double.log("replay")
        self._tape.run()

    def reset(self) -> None:
        if not self.was_reset and self._tape is not None:
            self._double.allocated -= self._double.bookkeeping
        self.was_reset = True
        self._tape = None
        if not any(one._tape for one in self._double.graphs if one._pool == self._pool):
            self._double.pools.pop(self._pool, None)  # as empty_cache gives it back
        self._double.log("reset")

    def pool(self) -> Any:
        return self._pool


class Stream:
    def __init__(self, double: CudaDouble, name: str) -> None:
        self._double, self.name = double, name
        self.side = name != "default"

    def wait_stream(self, other: Stream) -> None:
        self._double.alive()
        self._double.log(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._double.alive()
        self._double.log(f"{self.name} waits for event {event.number}")


class Event:
    def __init__(self, double: CudaDouble, enable_timing: bool = False) -> None:
        self._double, self.timing = double, enable_timing
        self.number = next(double.numbers)
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self._double.alive()
        self._double.clock += 0.25
        self.at = self._double.clock
        self._double.log(f"event {self.number} on {stream.name}")

    def synchronize(self) -> None:
        self._double.alive()
        self._double.log(f"host waits for event {self.number}")

    def elapsed_time(self, other: Event) -> float:
        assert self.timing and other.timing
        return 1000 * (other.at - self.at)


class CudaDouble:
    """State of the double: what was done, in order, and the faults it shall show."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.numbers = itertools.count()
        self.clock = 0.0
        self.capturing: Graph | None = None
        self.current = Stream(self, "default")
        self.graphs: list[Graph] = []
        self.pools: dict[Any, int] = {}
        self.free, self.total = 20 * 2**30, 24 * 2**30
        self.allocated = 0
        #: Bytes that older torch allocates when a capture begins, until its graph is reset.
        self.bookkeeping = 0
        self.lost = ""
        self.capability = (8, 6)
        self.allocations = 0
        self.allocates_in_replay = False
        #: Where the next capture fails ("capture_end"); "" nowhere.
        self.refuses = ""
        #: Whether a capture failed: torch's allocator then stops at the next look into its cache.
        self.poisoned = False
        self._sync_mode = 0
        self._watch: _NoWaiting | None = None

    def alive(self) -> None:
        """Raise what the GPU was lost by: after it, every call that reaches the driver fails alike."""
        if self.lost:
            raise RuntimeError(self.lost)

    def log(self, what: str) -> None:
        self.done.append(what)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.log(f"range {name}")
        yield

    def graph(self) -> Graph:
        self.graphs.append(Graph(self))
        return self.graphs[-1]

    def empty_cache(self) -> None:
        self.alive()
        if self.poisoned:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.log("empty_cache")

    def synchronize(self, device: Any = None) -> None:
        self.alive()
        self.log("host waits for the device")

    def set_sync_debug_mode(self, mode: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
        self._sync_mode = 2 if mode in ("error", 2) else 0
        if self._sync_mode:
            self._watch = _NoWaiting()
            self._watch.__enter__()

    def left(self, device: Any = None) -> tuple[int, int]:
        self.alive()
        return self.free, self.total

    def properties(self, device: Any) -> Any:
        return SimpleNamespace(
            name="Double of a GPU", major=self.capability[0], minor=self.capability[1],
            total_memory=self.total, multi_processor_count=82, uuid="1234-56",
        )  # fmt: skip

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pools = itertools.count(1)
        for name, value in {
            "CUDAGraph": self.graph,
            "Stream": lambda device=None: Stream(self, f"side {next(self.numbers)}"),
            "stream": self.stream,
            "current_stream": lambda device=None: self.current,
            "Event": lambda enable_timing=False: Event(self, enable_timing),
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "graph_pool_handle": lambda: ("pool", next(pools)),
            "memory_reserved": lambda device=None: sum(self.pools.values()) + self.allocated,
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.allocated,
            "mem_get_info": self.left,
            "memory_stats": lambda device=None: {"allocation.all.allocated": self.allocations},
            "get_sync_debug_mode": lambda: self._sync_mode,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "get_device_properties": self.properties,
            "get_device_capability": lambda device=None: self.capability,
            "get_arch_list": lambda: ["sm_80", "sm_86", "sm_90", "compute_90"],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.nvtx, "range", self.range)
        # Page-locked memory needs a driver.
        from lantern_accel_cuda import copies, handles

        monkeypatch.setattr(handles, "_streams", {})
        monkeypatch.setattr(copies, "pinned_like", torch.empty_like)


def doubled_backend(
    monkeypatch: pytest.MonkeyPatch, *, trusted: bool = True, **options: str
) -> tuple[Any, CudaDouble]:
    """Return the real backend on the double, its tensors in host memory.

    By torch's operators, unless ``preset`` says otherwise: host memory has no Triton outside its
    interpreter. ``trusted``: kernels serve without their check of first use.
    """
    from lantern_accel_cuda.backend import DeviceBackend
    from lantern_accel_cuda.options import Options

    double = CudaDouble()
    double.install(monkeypatch)
    backend = DeviceBackend(0, Options.read({"preset": "safe"} | options))
    backend.device = torch.device("cpu")
    if trusted:
        backend.trust = lambda kernel: True
        backend.choices = lambda stage, outputs, inputs, dtype, rows: 0
    return backend, double


__all__ = ["CudaDouble", "doubled_backend"]
