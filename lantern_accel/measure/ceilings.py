"""What the device reaches on simple work: copying, multiplying, launching.

Best of several readings: a ceiling is what was possible, noise only lowers it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lantern_accel.device.backend import Backend, Replay
from lantern_accel.measure.record import Ceilings, Reading, not_measured

#: Seconds that one reading should take, so that the stopwatch's own cost does not count.
READING = 0.01
REPEATS = 7
#: Tiny operators in one launch reading.
CHAIN = 200
LARGEST_BUFFER = 2**28
LARGEST_MATRIX = 8192


def measure_ceilings(
    backend: Backend, dtype: torch.dtype, say: Callable[[str], None] = lambda text: None
) -> Ceilings:
    """Measure copy bandwidth, matrix products in ``dtype`` and float32, and the cost of a launch."""
    say("ceilings: copying")
    size = _buffer_bytes(backend)
    flops: dict[str, Reading] = {}
    sizes: dict[str, int] = {}
    copy = _reading(lambda: _copy(backend, size), "the copy failed")
    for one in dict.fromkeys((dtype, torch.float32)):
        name = str(one).removeprefix("torch.")
        say(f"ceilings: matrix products in {name}")
        try:
            flops[name], sizes[name] = _matmul(backend, one)
        except RuntimeError as error:
            flops[name] = not_measured(f"the product failed: {_first_line(error)}")
    say("ceilings: launching")
    eager, captured = _launch(backend)
    return Ceilings(
        copy_bytes_per_s=copy,
        copy_bytes=size,
        matmul_flops=flops,
        matmul_sizes=sizes,
        launch_seconds=eager,
        captured_launch_seconds=captured,
    )


def _reading(measure: Callable[[], float], failure: str) -> Reading:
    try:
        return measure()
    except RuntimeError as error:
        return not_measured(f"{failure}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _buffer_bytes(backend: Backend) -> int:
    """Return a buffer size far beyond caches and far below the memory."""
    limit = backend.memory().limit or backend.facts().memory_bytes or 16 * LARGEST_BUFFER
    return min(LARGEST_BUFFER, limit // 16)


def _best_seconds(backend: Backend, run: Callable[[], object]) -> float:
    """Return the least seconds of one call, each reading long enough to be trusted."""
    run()
    calls = 1
    while True:
        with backend.stopwatch() as watch:
            for _ in range(calls):
                run()
        if watch.seconds >= READING or calls >= 2**16:
            break
        calls *= 4
    best = watch.seconds / calls
    for _ in range(REPEATS - 1):
        with backend.stopwatch() as watch:
            for _ in range(calls):
                run()
        best = min(best, watch.seconds / calls)
    return best


def _copy(backend: Backend, size: int) -> float:
    """Return bytes read plus bytes written a second."""
    source = torch.ones(size // 4, dtype=torch.float32, device=backend.device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _best_seconds(backend, lambda: target.copy_(source))


def _matmul(backend: Backend, dtype: torch.dtype) -> tuple[float, int]:
    """Return the best FLOP a second over sizes 512, 1024, ..., and the size that reached it."""
    best, at, size = 0.0, 0, 512
    while size <= LARGEST_MATRIX:
        a = torch.full((size, size), 1.0 / size, dtype=dtype, device=backend.device)
        out = torch.empty_like(a)
        seconds = _best_seconds(backend, lambda a=a, out=out: torch.mm(a, a, out=out))  # type: ignore[misc]
        rate = 2 * size**3 / seconds
        if rate > best:
            best, at = rate, size
        if seconds > 2 * READING:
            break
        size *= 2
    return best, at


def _launch(backend: Backend) -> tuple[Reading, Reading]:
    """Return seconds a tiny operator, eager and within a replay."""
    x = torch.zeros(64, dtype=torch.float32, device=backend.device)

    def chain() -> None:
        for _ in range(CHAIN):
            x.add_(1.0)

    eager = _reading(lambda: _best_seconds(backend, chain) / CHAIN, "the launches failed")
    able = backend.support("capture")
    if not able:
        return eager, not_measured(able.reason or f"backend {backend.name!r} captures no step")

    def captured() -> float:
        replay: Replay = backend.capture(chain, "launch")
        try:
            return _best_seconds(backend, replay) / CHAIN
        finally:
            replay.release()

    return eager, _reading(captured, "the capture failed")
