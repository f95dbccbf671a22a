"""Measures what a device reaches on simple work: copying, reading, multiplying, launching.

Best of several readings: a ceiling is what was possible, noise only lowers it. Measured with torch's
own operators, because a datasheet's bandwidth is one that no program sees.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.device.clock import Work, both_clocks, lasting, products
from lantern_accel.errors import BackendError
from lantern_accel_profiles.measure.record import (
    Ceilings,
    ClockCheck,
    Reading,
    StepCell,
    is_measured,
    not_measured,
)

#: Seconds that one reading should take, so that the stopwatch's own cost does not count.
READING = 0.01
REPEATS = 7
#: Tiny operators in one launch reading.
CHAIN = 200
LARGEST_BUFFER = 2**28
#: Of a device with so much memory, whose caches are large: a buffer of four times that.
LARGE_MEMORY = 32 * 10**9
LARGEST_MATRIX = 8192


def measure_ceilings(
    backend: Backend, dtype: torch.dtype, say: Callable[[str], None] = lambda text: None
) -> Ceilings:
    """Measure bandwidth, matmuls in ``dtype`` and float32, and the cost of a launch."""
    say("ceilings: bandwidth")
    size = _buffer_bytes(backend)
    copied, read = (
        _reading(partial(one, backend, size), f"{name} failed")
        for name, one in (("the copy", _copy), ("the sum", _read))
    )
    flops: dict[str, Reading] = {}
    sizes: dict[str, int] = {}
    for one in dict.fromkeys((dtype, torch.float32)):
        name = str(one).removeprefix("torch.")
        say(f"ceilings: matmuls in {name}")
        try:
            flops[name], sizes[name] = _matmul(backend, one)
        except RuntimeError as error:
            flops[name] = not_measured(f"the matmul failed: {_first_line(error)}")
    # Numbers of any dtype can be multiplied as float32, where their own matmuls are slow.
    name, wide = str(dtype).removeprefix("torch."), flops["float32"]
    own = flops[name]
    if is_measured(own) and is_measured(wide) and own < wide:
        flops[name], sizes[name] = wide, sizes["float32"]
    say("ceilings: launches")
    eager, captured = _launch(backend)
    return Ceilings(
        copy_bytes_per_s=copied,
        read_bytes_per_s=read,
        copy_bytes=size,
        matmul_flops=flops,
        matmul_sizes=sizes,
        launch_seconds=eager,
        captured_launch_seconds=captured,
    )


def raise_ceilings(found: Ceilings, dtype: str, cell: StepCell) -> Ceilings:
    """Return ceilings of which none is below what a cell's fastest step has reached.

    Simple work is not always the fastest: weights may stay in a cache, or have a product of their own.
    """
    seconds, changes = min(cell.ms) / 1e3, dict[str, object]()
    rate, width = found.matmul_flops.get(dtype), found.bandwidth
    if is_measured(rate) and cell.floor_flops > rate * seconds:
        changes["matmul_flops"] = found.matmul_flops | {dtype: cell.floor_flops / seconds}
    if is_measured(width) and cell.floor_bytes > width * seconds:
        changes["read_bytes_per_s"] = cell.floor_bytes / seconds
    if not changes:
        return found
    return found.model_copy(update=changes | {"raised_by": cell.label})


def _reading(measure: Callable[[], float], failure: str) -> Reading:
    try:
        return measure()
    except RuntimeError as error:
        return not_measured(f"{failure}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _buffer_bytes(backend: Backend) -> int:
    """Return a buffer size far beyond caches and far below the free memory."""
    use = backend.memory()
    limit = use.free or use.limit or backend.facts().memory_bytes or 16 * LARGEST_BUFFER
    most = LARGEST_BUFFER * (4 if (backend.facts().memory_bytes or 0) > LARGE_MEMORY else 1)
    return max(min(most, limit // 16), 2**16)


def _best_seconds(backend: Backend, run: Callable[[], object]) -> float:
    """Return the least seconds of one call, each reading long enough to be trusted."""

    def once() -> object:
        # A lazy device computes what is still wanted when its work is marked, and nothing else.
        result = run()
        backend.flush()
        return result

    once()

    def reading(calls: int) -> float:
        with backend.stopwatch() as watch:
            for _ in range(calls):
                once()
        return watch.seconds

    calls, seconds = 1, reading(1)
    while seconds < READING and calls < 2**16:
        calls *= 4
        seconds = reading(calls)
    return min(seconds, *(reading(calls) for _ in range(REPEATS - 1))) / calls


def _copy(backend: Backend, size: int) -> float:
    source = torch.ones(size // 4, dtype=torch.float32, device=backend.device)
    target = torch.zeros_like(source)
    # No plain copy: a lazy device would let both be the same memory.
    return 2 * source.nbytes / _best_seconds(backend, partial(torch.neg, source, out=target))


def _read(backend: Backend, size: int) -> float:
    source = torch.ones(size // 4, dtype=torch.float32, device=backend.device)
    return source.nbytes / _best_seconds(backend, partial(torch.sum, source))


def _matmul(backend: Backend, dtype: torch.dtype) -> tuple[float, int]:
    """Return the best FLOP/s over sizes 512, 1024, ..., and the size that reached it."""
    best, at, size = 0.0, 0, 512
    while size <= LARGEST_MATRIX:
        a = torch.full((size, size), 1.0 / size, dtype=dtype, device=backend.device)
        seconds = _best_seconds(backend, partial(torch.mm, a, a, out=torch.empty_like(a)))
        best, at = max((best, at), (2 * size**3 / seconds, size))
        if seconds > 2 * READING:
            break
        size *= 2
    return best, at


def _launch(backend: Backend) -> tuple[Reading, Reading]:
    """Return the seconds of a tiny operator, eager and within a replay."""
    x = torch.zeros(64, dtype=torch.float32, device=backend.device)

    def chain() -> None:
        for _ in range(CHAIN):
            x.add_(1.0)

    eager = _reading(lambda: _best_seconds(backend, chain) / CHAIN, "the launches failed")
    able = backend.support("capture")
    if not able:
        return eager, not_measured(able.reason or f"backend {backend.name!r} captures no step")

    def time_captured() -> float:
        replay = backend.capture(chain, "launch")
        try:
            return _best_seconds(backend, replay) / CHAIN
        finally:
            replay.release()

    return eager, _reading(time_captured, "the capture failed")


# --- the stopwatch that all of it is read from ----------------------------------------------------

#: The work is made at least this long, so that launching is a small part of it.
STOPWATCH_WORK = 0.03
STOPWATCH_RATIO = (0.7, 1.3)


def check_stopwatch(backend: Backend, work: Callable[[int], Work] | None = None) -> ClockCheck:
    """Time one piece of work by stopwatch and until the host sees its end; raises BackendError.

    A stopwatch that does not wait for an asynchronous device reads the launches only, and fails here.
    What else runs on the machine slows both clocks and fails neither.
    ``work(count)`` returns ``count`` pieces of work; it is grown until the host sees it take 30 ms.
    """
    run = lasting(work or partial(products, backend), STOPWATCH_WORK)
    pairs = [both_clocks(backend, run) for _ in range(5)]
    ratio = statistics.median(watch / host for watch, host in pairs)
    seconds = statistics.median(host for _, host in pairs)
    name = backend.stopwatch().name
    if not STOPWATCH_RATIO[0] <= ratio <= STOPWATCH_RATIO[1]:
        raise BackendError(
            f"the stopwatch of backend {backend.name!r} ({name}) reads {ratio:.2f} of the time "
            f"that {seconds:.3f} s of work took until its result was there; it does "
            "not measure the device, so nothing is profiled with it; correct its stopwatch() and "
            "synchronize()"
        )
    return ClockCheck(stopwatch=name, work_seconds=seconds, ratio=ratio)
