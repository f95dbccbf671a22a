"""This backend's own conformance checks: what a GPU must show beyond what every device must."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lantern_accel.device.backend import DTYPES
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import caches as cache_checks
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, within
from lantern_accel_cuda import attention as caches

if TYPE_CHECKING:
    from lantern_accel_cuda.backend import DeviceBackend

#: Replays that may allocate nothing.
REPLAYS = 20
#: Largest difference of a fused kernel from torch's operators, for values of about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Let torch raise where an operator makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise NotApplicable("the package triton is not installed")


@contextmanager
def _with(backend: DeviceBackend, **options: Any) -> Iterator[None]:
    before = backend.options
    backend.options = dataclasses.replace(before, **options)
    try:
        yield
    finally:
        backend.options = before


def no_host_read(backend: DeviceBackend) -> Measured:
    """Run prefill, eager steps and posts of the lengths with waiting forbidden."""
    for strategy in STRATEGIES:
        for temperature in (0.0, 1.0):
            engine = tiny.tiny_engine(backend, strategy, batch=2, temperature=temperature)
            tiny.start(engine, 0)
            engine.step()  # what is made once may wait
            engine._progress.post()
            backend.synchronize()
            try:
                with _no_waiting():
                    engine.prefill()
                    for _ in range(3):
                        engine.step()
                        engine._progress.post()
            except RuntimeError as error:
                line = str(error).splitlines()[0]
                raise Failed(f"{strategy}, temperature {temperature:g}: {line}") from error
            for _ in range(4):
                engine._progress.read()
    return Measured(f"{2 * len(STRATEGIES)} steps under set_sync_debug_mode('error')")


def _allocator(backend: DeviceBackend) -> dict[str, int]:
    """Count what the allocator gave out and what it asked the driver for, since the start."""
    stats = torch.cuda.memory_stats(backend.device)
    names = {"allocations": "allocation.all.allocated", "segments": "segment.all.allocated"}
    return {short: int(stats.get(name, 0)) for short, name in names.items()}


def no_allocation(backend: DeviceBackend) -> Measured:
    """Replay captured steps: the allocator gives out nothing and asks the driver for nothing."""
    if backend.options.graph == "off":
        raise NotApplicable("nothing is captured with graph=off")
    for strategy in STRATEGIES:
        engine = tiny.tiny_engine(backend, strategy, batch=2)
        replays = [backend.capture(engine.prefill, "prefill"), backend.capture(engine.step, "step")]
        try:
            tiny.start(engine, 0, replays[0])
            backend.synchronize()
            before = _allocator(backend)
            for _ in range(REPLAYS):
                replays[1]()
            backend.synchronize()
            after = _allocator(backend)
        finally:
            for one in replays:
                one.release()
        for name, count in after.items():
            if count != before[name]:
                raise Failed(f"{strategy}: {count - before[name]} {name} in {REPLAYS} replays")
        kept = backend.counters()["graph_bytes_kept"]
        if kept:
            raise Failed(
                f"{strategy}: captured functions keep {kept} bytes in their pool, which replays of "
                "other graphs may overwrite"
            )
    return Measured(f"no allocation in {REPLAYS} replays of {len(STRATEGIES)} strategies")


def released(backend: DeviceBackend) -> Measured:
    """Capture and release again and again: the memory in use comes back."""
    engine = tiny.tiny_engine(backend, "lantern++")

    def once() -> int:
        backend.capture(engine.step, "step").release()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(backend.device)

    first = once()
    last = [once() for _ in range(3)][-1]
    if last > first:
        raise Failed(f"{last - first} bytes stay after three captures were released")
    return Measured("a released graph's memory comes back")


def _attention(kind: str) -> Callable[[Any], Measured]:
    def check(backend: DeviceBackend) -> Measured:
        if kind == "triton":
            _need_triton()
        with _with(backend, attention=kind):
            return cache_checks.attention(backend)

    return check


def fused(backend: DeviceBackend) -> Measured:
    """Compare the fused Triton kernels with torch's operators in every dtype of the GPU."""
    _need_triton()
    from lantern_accel_cuda.kernels import fused as kernels

    reference = TensorOps()
    worst, at = 0.0, 1.0
    for name, dtype in DTYPES.items():
        if not backend.support(name):
            continue

        def random(*shape: int, seed: int = 0, to: torch.dtype = dtype) -> Tensor:
            made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            return made.to(device=backend.device, dtype=to)

        x, weight = random(2, 60, 1280), random(1280, seed=1)
        pairs = [(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))]
        pairs.append((kernels.swiglu(x), reference.swiglu(x)))
        layout = caches.layout(2, 2, 101, 3, 100, dtype)
        reference.device = backend.device
        ours, theirs = (reference.allocate(layout) for _ in range(2))
        qkv = random(2, 60, 3, 3, 100)
        angles = random(1, 60, 1, 1, 50, to=torch.float32)
        rotary = (angles.cos(), angles.sin())
        slots = torch.arange(20, 80, device=backend.device).expand(2, -1)
        address = reference.address(ours, slots)
        turned = reference.rotate(qkv[:, :, :2], rotary)
        reference.write(theirs, 1, address, turned[:, :, 1], qkv[:, :, 2])
        pairs.append((kernels.rotate_write(qkv, rotary, ours, 1, address), turned[:, :, 0]))
        pairs.append((ours.keys[1], theirs.keys[1]))
        pairs.append((ours.values[1], theirs.values[1]))
        for index, (got, want) in enumerate(pairs):
            error = float((got.float() - want.float()).abs().max())
            what = ("rms_norm", "swiglu", "rotation", "written keys", "written values")[index]
            within(error, TOLERANCE[dtype], f"{what} in {dtype}")
            if error / TOLERANCE[dtype] >= worst / at:
                worst, at = error, TOLERANCE[dtype]
    return within(worst, at, "fused kernels against torch's operators")


def _sampled(name: str) -> Callable[[Any], Measured]:
    def check(backend: DeviceBackend) -> Measured:
        _need_triton()
        from lantern_accel_cuda import sampled

        found: Measured = getattr(sampled, name)(backend)
        return found

    return check


CHECKS: dict[str, Callable[[Any], Any]] = {
    "gpu.no_host_read": no_host_read,
    "gpu.no_allocation": no_allocation,
    "gpu.released": released,
    "gpu.attention_sdpa": _attention("sdpa"),
    "gpu.attention_matmul": _attention("matmul"),
    "gpu.attention_triton": _attention("triton"),
    "gpu.fused_kernels": fused,
    "gpu.sampling_kernels": _sampled("filters_and_draws"),
    "gpu.accept_kernel": _sampled("walks"),
}
