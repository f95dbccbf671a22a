"""A recording double of Habana's bridge on CPU tensors, with the semantics that are documented.

Capturing executes; a replay runs what was recorded on the same buffers and gives the same tensors;
HPUGraph is there in lazy mode alone; a process captures one graph at a time, ending on the stream it
began on; an operator that falls back to the CPU ends a capture; counters move when something compiles.
Sources: habana_frameworks 1.19 (hpu/graphs.py, HPUGraph.cpp, cpu_fallback.cpp, metrics.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lantern_accel_hpu.bridge import UNSAFE

GIB = 2**30


class Metric:
    """One of the bridge's metrics; ``stats`` are pairs, some of them not integers."""

    def __init__(self, **stats: Any) -> None:
        self._stats = stats

    def stats(self) -> list[tuple[str, Any]]:
        return [(k, dict(v) if isinstance(v, dict) else v) for k, v in self._stats.items()]

    def add(self, name: str, count: int = 1) -> None:
        self._stats[name] += count


class _Record(TorchDispatchMode):
    """Executes operators, and records them with the very tensors they ran on."""

    def __init__(self, graph: HPUGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.graph.recorded.append((func, args, kwargs or {}, out))
        return out


class Gaudi:
    """``habana_frameworks.torch.hpu``, lazy or eager; ``log``: what was called, in order."""

    def __init__(self, *, lazy: bool = False, limit: int = 94 * GIB, modules: int = 1) -> None:
        self.log: list[str] = []
        #: Modules that other processes hold, and the one that this process got.
        self.busy: set[int] = set()
        self.all_modules = range(modules)
        self.module: int | None = None
        self._pending: list[Callable[[], None]] = []
        #: Errors of earlier work, of which each wait raises one.
        self.errors: list[Exception] = []
        self.in_use, self.limit = 1 * GIB, limit
        self.compile_calls: list[dict[str, Any]] = []  # what torch.compile was given
        self.capturing_graph: Any = None
        self.stream_now = self.first_stream = Stream()
        self.counted = {
            "graph_compilation": Metric(TotalNumber=0, TotalTime=0, AvgTime=0.0),
            "cpu_fallback": Metric(TotalNumber=0, FallbackOps={}),
            "recipe_cache": Metric(TotalHit=0, TotalMiss=0),
        }
        self.metrics = SimpleNamespace(metric_global=self.metric_global)
        if lazy:
            self.HPUGraph = lambda: HPUGraph(self)
            self.graph = self._graph

    # --- device --------------------------------------------------------------------------------

    def is_initialized(self) -> bool:
        return self.module is not None

    def get_device_name(self, device=None) -> str:
        return "GAUDI2"

    def current_device(self) -> int:
        """Acquire a card as the driver does (device.cpp), and return the only index there is."""
        if self.module is not None:
            return 0
        named, listed = os.environ.get("HLS_MODULE_ID"), _listed()
        if named is not None:
            if int(named) in self.all_modules and int(named) not in self.busy:
                self.module = int(named)
                return 0
            if listed:  # another card may be taken in its place only where none is named
                raise RuntimeError("synStatus=20 [Device already acquired] Device acquire failed.")
        free = [one for one in listed or self.all_modules if one not in self.busy]
        if not list(self.all_modules):
            raise RuntimeError(
                "synStatus=8 [Device not found] Device acquire failed. No devices found."
            )
        if not free:
            raise RuntimeError("synStatus=26 [Generic failure] Device acquire failed.")
        self.module = free[0]
        return 0

    def synchronize(self) -> None:
        self.log.append("synchronize")
        if self.errors:
            raise self.errors.pop(0)
        self.finish()

    def finish(self) -> None:
        """Own addition: let what the device has yet to compile be compiled, and counted."""
        pending, self._pending = self._pending, []
        for one in pending:
            one()

    def later(self, what: Callable[[], None]) -> None:
        """Own addition: do ``what`` (compile, fall back) when the device is waited for."""
        self._pending.append(what)

    def memory_stats(self, device=None) -> dict[str, int]:
        return {"Limit": self.limit, "InUse": self.in_use, "MaxInUse": self.in_use, "NumAllocs": 3}

    def reset_peak_memory_stats(self, device=None) -> None:
        self.log.append("reset_peak_memory_stats")

    def Event(self, enable_timing=False) -> Event:
        return Event(self)

    # --- streams -------------------------------------------------------------------------------

    def current_stream(self, device=None) -> Stream:
        return self.stream_now

    def default_stream(self, device=None) -> Stream:
        return self.first_stream

    def Stream(self, device=None, priority=0) -> Stream:
        return Stream()

    @contextlib.contextmanager
    def stream(self, stream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    # --- metrics -------------------------------------------------------------------------------

    def metric_global(self, name: str) -> Metric | None:
        return self.counted.get(name)

    def compile(self, times: int = 1) -> None:
        """Own addition: count compilations of whole graphs, lazy or by torch.compile."""
        self.counted["recipe_cache"].add("TotalMiss", times)
        self.counted["graph_compilation"].add("TotalNumber", times)
        self.counted["graph_compilation"].add("TotalTime", 1000 * times)

    def compile_operator(self, times: int = 1) -> None:
        """Own addition: compile operators of eager mode, of which no event tells; caches tell."""
        self.counted["recipe_cache"].add("TotalMiss", times)

    def fall_back(self, operator: str) -> None:
        """Own addition: run an operator on the CPU, which counts first and then ends a capture."""
        metric = self.counted["cpu_fallback"]
        metric.add("TotalNumber")
        operators = metric._stats["FallbackOps"]
        operators[operator] = operators.get(operator, 0) + 1
        if self.capturing_graph is not None:
            raise RuntimeError("cpu fallback is not supported during hpu graph capturing")

    # --- graphs --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _graph(self, hpu_graph, stream=None, dry_run=False) -> Iterator[None]:
        self.synchronize()
        with self.stream(stream if stream is not None else Stream()):
            hpu_graph.capture_begin(dry_run)
            try:
                yield
            finally:
                hpu_graph.capture_end()


class Stream:
    """An order of work, of which the backend asks nothing but who it is."""


def _listed() -> list[int]:
    return [int(one) for one in re.findall(r"\d+", os.environ.get("HABANA_VISIBLE_MODULES", ""))]


class Event:
    def __init__(self, bridge: Gaudi) -> None:
        self.bridge, self.at = bridge, 0.0

    def record(self, stream=None) -> None:
        self.bridge.log.append("record")
        self.at = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        self.bridge.log.append("event.synchronize")
        self.bridge.finish()

    def elapsed_time(self, end_event) -> float:
        return 1000 * (end_event.at - self.at)


class HPUGraph:
    """A captured graph; ``recorded`` operators with the tensors they read and wrote."""

    def __init__(self, bridge: Gaudi) -> None:
        self.bridge = bridge
        self.recorded: list[Any] | None = None

    def capture_begin(self, dry_run=False) -> None:
        if self.bridge.capturing_graph is not None:
            raise RuntimeError("GRAPH:: graph Capture already in progress")
        self.bridge.log.append("capture_begin")
        self.bridge.capturing_graph, self._stream = self, self.bridge.stream_now
        self.recorded, self._mode = [], _Record(self)
        self._mode.__enter__()

    def capture_end(self) -> None:
        if self.bridge.stream_now is not self._stream:
            raise RuntimeError("GRAPH:: Capture must end on the same stream it began on.")
        self._mode.__exit__(None, None, None)
        self.bridge.log.append("capture_end")
        self.bridge.capturing_graph = None
        self.bridge.compile()

    def replay(self, asynchronous=False) -> None:
        if self.bridge.capturing_graph is not None:
            raise RuntimeError("GRAPH:: Capture in progress")
        assert self.recorded is not None, "nothing was captured"
        self.bridge.log.append("replay")
        for func, args, kwargs, out in self.recorded:
            # What shares memory with an argument shows what that holds: views, and in-place writes.
            places = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
            made = [t for t in tensors_of(out) if t.untyped_storage().data_ptr() not in places]
            if made or func._schema.is_mutable:
                new = func(*args, **kwargs)
                if made:
                    tree_map(_overwrite, out, new)

    def reset(self) -> None:
        self.bridge.log.append("reset")
        self.recorded = None


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)


# --- fused kernels ------------------------------------------------------------------------------


class FusedSDPA(torch.autograd.Function):
    """Attention as Habana documents it: positional, heads first, causal or a mask but not both.

    As in the vendor's wrapper, who leaves out ``recompute_mode`` (eight arguments) has it asked for in
    a module that Dynamo does not trace.
    """

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        softmax_mode="None",
        recompute_mode=None,
        valid_seq_len=None,
        seq_padding_type="left",
        return_dropout_mask=False,
        return_attn_probs=False,
    ):
        if recompute_mode is None:
            torch._dynamo.disable(lambda: True)()
        if is_causal and attn_mask is not None:
            raise AssertionError("is_causal and a mask exclude each other")
        # The bridge would take it for None, and say nothing.
        if softmax_mode not in ("None", "fast"):
            raise AssertionError(f"release 1.19 has no softmax mode {softmax_mode!r}")
        if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
            raise AssertionError(f"heads first is wanted, got {q.shape}, {k.shape}, {v.shape}")
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale
        )


class FusedRMSNorm(torch.autograd.Function):
    """RMS norm on three axes and one dtype, in float32 inside, rounded once."""

    @staticmethod
    def forward(ctx, data_in, gamma, eps, use_stages=True, bwd_mode=0, fast_math=False):
        if data_in.dim() != 3 or data_in.dtype != gamma.dtype:
            raise AssertionError(f"three axes and one dtype are wanted, got {data_in.shape}")
        x = data_in.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * scale * gamma.float()).to(data_in.dtype)


class RotaryPosEmbeddingMode:
    BLOCKWISE = "blockwise"
    PAIRWISE = "pairwise"


def apply_rotary_pos_emb(p, *args):
    """The documented formula of both modes; ``cos, sin [1, S, 1, d]`` for ``p [B, S, H, d]``."""
    cos, sin, position_ids, offset, mode = args
    if mode != RotaryPosEmbeddingMode.PAIRWISE or position_ids is not None or offset:
        raise AssertionError("adjacent pairs are turned by PAIRWISE, without positions")
    if cos.shape != (1, p.shape[1], 1, p.shape[3]):
        raise AssertionError(f"angles {cos.shape} do not fit positions {p.shape}")
    halves = torch.stack((-p[:, :, :, 1::2], p[:, :, :, ::2]), dim=-1)
    return p * cos + halves.flatten(-2) * sin


# --- modules ------------------------------------------------------------------------------------


def sdk(hpu: Gaudi) -> dict[str, dict[str, Any]]:
    """Return what the SDK's modules hold, by name, parents first."""

    def mark_step(device_str="", sync=False) -> None:
        hpu.log.append("mark_step")

    backend = "habana_frameworks.torch.dynamo.compile_backend"
    return {
        "habana_frameworks": {},
        "habana_frameworks.torch": {},
        "habana_frameworks.torch.hpu": {n: getattr(hpu, n) for n in dir(hpu) if n[0] != "_"},
        "habana_frameworks.torch.core": {"mark_step": mark_step},
        "habana_frameworks.torch.utils": {},
        "habana_frameworks.torch.utils.internal": {"is_lazy": lambda: hasattr(hpu, "graph")},
        "habana_frameworks.torch.dynamo": {},
        backend: {},
        f"{backend}.config": dict.fromkeys(UNSAFE, True),
        "habana_frameworks.torch.hpex": {},
        "habana_frameworks.torch.hpex.kernels": {
            "FusedSDPA": FusedSDPA,
            "RotaryPosEmbeddingMode": RotaryPosEmbeddingMode,
            "apply_rotary_pos_emb": apply_rotary_pos_emb,
        },
        "habana_frameworks.torch.hpex.normalization": {"FusedRMSNorm": FusedRMSNorm},
    }


def hlml(modules: Sequence[int], fails: str = "", joules: int = 7) -> SimpleNamespace:
    """Return a double of habana-pyhlml: a card a module number; ``fails``: its driver is missing."""

    def start() -> None:
        print("Failed to load libhlml" if fails else "", end="")
        if fails:
            raise RuntimeError(fails)

    return SimpleNamespace(
        hlmlInit=start,
        hlmlGetDriverVersion=lambda: b"1.24.1-abc\n",
        hlmlDeviceGetCount=lambda: len(modules),
        hlmlDeviceGetHandleByIndex=lambda index: index,
        hlmlDeviceGetModuleID=lambda device: modules[device],
        hlmlDeviceGetTotalEnergyConsumption=lambda device: 1000 * joules + device,
    )


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [one for one in tree_flatten(value)[0] if isinstance(one, Tensor)]


def on_cpu(backend: Any) -> Any:
    """Let a backend that was opened on the double compute on the CPU's tensors."""
    backend.device = torch.device("cpu")
    return backend


def compiling(bridge: Gaudi) -> Callable[..., Any]:
    """Return a ``torch.compile`` whose backend counts, as the bridge does, and runs on the CPU."""
    real = torch.compile

    def compile_(function: Callable[..., Any], **arguments: Any) -> Any:
        bridge.compile_calls.append(arguments)

        def backend(module: Any, inputs: Any) -> Any:
            bridge.compile()
            bridge.log.append("compile")
            return module.forward

        known = {k: v for k, v in arguments.items() if k in ("fullgraph", "dynamic")}
        return real(function, backend=backend, **known)

    return compile_
