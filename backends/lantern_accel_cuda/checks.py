"""This backend's own conformance checks: what a GPU must show beyond what every device must."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable
from lantern_accel_cuda import agreement
from lantern_accel_cuda.options import has_triton

#: The backend that is checked; it asks for these checks, so that they do not name its class.
_Backend = Any
#: Replays that may allocate nothing.
REPLAYS = 20


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Let torch raise where an operator makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def no_host_read(backend: _Backend) -> Measured:
    """Run prefill, eager steps and posts of the lengths with waiting forbidden."""
    for strategy in STRATEGIES:
        for temperature in (0.0, 1.0):
            engine = tiny.tiny_engine(backend, strategy, batch=2, temperature=temperature)
            tiny.start(engine, 0)
            engine.step()  # what is made once may wait
            engine.session.progress.post()
            backend.synchronize()
            try:
                with _no_waiting():
                    engine.prefill()
                    for _ in range(3):
                        engine.step()
                        engine.session.progress.post()
            except RuntimeError as error:
                line = str(error).splitlines()[0]
                raise Failed(f"{strategy}, temperature {temperature:g}: {line}") from error
            for _ in range(4):
                engine.session.progress.read()
    return Measured(f"{2 * len(STRATEGIES)} steps under set_sync_debug_mode('error')")


def _allocator(backend: _Backend) -> dict[str, int]:
    """Count what the allocator gave out and what it asked the driver for, since the start."""
    stats = torch.cuda.memory_stats(backend.device)
    names = {"allocations": "allocation.all.allocated", "segments": "segment.all.allocated"}
    return {short: int(stats.get(name, 0)) for short, name in names.items()}


def no_allocation(backend: _Backend) -> Measured:
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


def repeated_captures(backend: _Backend) -> Measured:
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


def sampling(site: agreement.Site) -> Measured:
    """Compare filters, draws, races and walks on rows as long as a codebook, for many images."""
    agreement.filters(site, (1000, 16384))
    agreement.samples(site, (1000, 16384))
    agreement.race(site, (1000, 16384))
    return agreement.walks(site, 4096, agreement.IMAGES)


def _by_triton(compare: Callable[[agreement.Site], Measured]) -> Callable[[_Backend], Measured]:
    def check(backend: _Backend) -> Measured:
        if not has_triton():
            raise NotApplicable("the package triton is not installed")
        return compare(backend.site)

    return check


CHECKS: dict[str, Callable[[_Backend], Measured]] = {
    "gpu.no_host_read": no_host_read,
    "gpu.no_allocation": no_allocation,
    "gpu.released": repeated_captures,
    "gpu.sampling_kernels": _by_triton(sampling),
    **{f"gpu.kernel_{name}": _by_triton(one) for name, one in agreement.KERNELS.items()},
}
