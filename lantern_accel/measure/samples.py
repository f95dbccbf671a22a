"""Measuring one cell: the cold decoding, its memory, its phases, its work, and one timed sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from lantern_accel.device.backend import inferring
from lantern_accel.generation.pipeline import Pipeline, Prompt, Ready
from lantern_accel.generation.result import GenerationResult
from lantern_accel.measure.bench import PHASES as STEP_PHASES
from lantern_accel.measure.bench import timed_phases
from lantern_accel.measure.environment import HostLoad
from lantern_accel.measure.record import (
    Cell,
    Memory,
    Sample,
    Warmup,
    Work,
    not_measured,
)
from lantern_accel.measure.work import measure_work
from lantern_accel.strategy.values import Sampling

#: Warm-up ends at the latest after this many rounds, in a quick run after fewer ...
MOST_WARMUPS = 12
QUICK_WARMUPS = 4
#: ... and when the best of the last two is not this much faster than the best before them.
GAIN = 0.05


def batch_prompts(prompts: Sequence[Prompt], batch: int, seed: int) -> list[Prompt]:
    """Return the prompts of one request; seeds walk through the list, so cells see the same ones."""
    return [prompts[(seed * batch + i) % len(prompts)] for i in range(batch)]


def request(
    pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], seed: int
) -> GenerationResult:
    """Serve one request of a cell, text to pixels."""
    return pipeline.generate(
        batch_prompts(prompts, cell.batch, seed),
        strategy=cell.strategy,
        temperature=cell.temperature,
        seed=seed,
        batch_size=cell.batch,
    )


def ready_of(pipeline: Pipeline, cell: Cell) -> tuple[Ready, Sampling]:
    """Return a cell's engine and its sampling settings."""
    sampling = pipeline.sampling(temperature=cell.temperature)
    return pipeline.engine(cell.batch, cell.strategy, sampling), sampling


@inferring
def warm_up(
    pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], seed: int, session: int
) -> Warmup:
    """Serve a request that is not counted, then one step more to see whether a counter still rises."""
    backend = pipeline.backend
    began = time.perf_counter()
    request(pipeline, cell, prompts, seed)
    seconds = time.perf_counter() - began
    before = backend.counters()
    # Complete images stand still under a step, and the next request clears the buffers.
    ready_of(pipeline, cell)[0].step()
    backend.synchronize()
    rising = {
        name: count - before.get(name, 0)
        for name, count in backend.counters().items()
        if count > before.get(name, 0)
    }
    return Warmup(session=session, seconds=seconds, rising=rising)


def has_settled(warmup: Sequence[Warmup]) -> bool:
    """Say whether times and counters stand still; the first, cold decoding is not looked at.

    Noise makes single times long, never short: so the best times are compared.
    """
    warm = warmup[1:]
    if len(warm) < 3:
        return False
    before = min(w.seconds for w in warm[:-2])
    latest = min(w.seconds for w in warm[-2:])
    return latest >= (1 - GAIN) * before and not warm[-1].rising


@inferring
def cold(pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], session: int) -> None:
    """Measure a cell with nothing kept from before: first decoding, memory, phases, work."""
    backend = pipeline.backend
    pipeline.release_engines()
    first = warm_up(pipeline, cell, prompts, 0, session)
    cell.warmup.append(first)
    cell.cold_seconds = first.seconds
    ready, sampling = ready_of(pipeline, cell)
    cell.captured = ready.step.captured
    cell.capture_seconds = ready.prefill.seconds + ready.step.seconds
    cell.capture_bytes = ready.prefill.nbytes + ready.step.nbytes
    backend.reset_peak_memory()
    cell.warmup.append(warm_up(pipeline, cell, prompts, 1, session))
    cell.memory = _memory(pipeline, ready)
    cell.step_ms, cell.step_ms_from = _step_ms(pipeline, cell, prompts, ready, sampling)
    cell.work = _work(pipeline, ready)


def _memory(pipeline: Pipeline, ready: Ready) -> Memory:
    use = pipeline.backend.memory()
    missing = not_measured(f"backend {pipeline.backend.name!r} reads no peak")
    return Memory(
        peak_bytes=missing if use.peak is None else float(use.peak),
        definition=use.definition or "as the backend's memory() counts it",
        buffers_bytes=ready.engine.nbytes,
    )


def _step_ms(
    pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], ready: Ready, sampling: Sampling
) -> tuple[dict[str, float], Literal["eager", "recording"]]:
    """Return milliseconds a step by phase, and what was timed.

    A recording that keeps its phases apart is timed itself; else the Python step is, whose phases have
    edges at which the device can be waited for.
    """
    texts = batch_prompts(prompts, cell.batch, 0)
    recorded: dict[str, float] = {}

    def replay() -> None:
        for name, seconds in (ready.step.timed() or {}).items():
            recorded[name] = recorded.get(name, 0.0) + seconds

    def once(step: Callable[[], None]) -> tuple[dict[str, float], float, int]:
        with timed_phases(pipeline) as sums:
            done, seconds = pipeline.decode_only(texts, cell.strategy, sampling, 0, step=step)
        return dict(sums), seconds, int(done.steps.max())

    apart = cell.captured and ready.step.timed() is not None
    if apart:
        _, seconds, steps = once(replay)
        sums = {name: recorded.get(name, 0.0) for name in STEP_PHASES}
    else:
        if cell.captured:
            once(ready.engine.step)  # what was captured has not run eagerly before
        sums, seconds, steps = once(ready.engine.step)
    split = {name: 1e3 * value / max(steps, 1) for name, value in sums.items()}
    rest = seconds - sum(sums.values())
    # Prefill is in these seconds; the samples tell what it takes, and the report takes it off.
    split["host"] = 1e3 * max(rest, 0.0) / max(steps, 1)
    return split, "recording" if apart else "eager"


def _work(pipeline: Pipeline, ready: Ready) -> dict[str, Work]:
    with pipeline.backend.inference():
        return measure_work(pipeline, ready.engine)


def take_sample(
    pipeline: Pipeline,
    cell: Cell,
    prompts: Sequence[Prompt],
    *,
    number: int,
    session: int,
    order: int,
    at: float,
    seed: int,
) -> Sample:
    """Serve one timed request and return its figures."""
    backend = pipeline.backend
    load = HostLoad()
    before = backend.energy_mj()
    began = time.perf_counter()
    result = request(pipeline, cell, prompts, seed)
    wall = time.perf_counter() - began
    after = backend.energy_mj()
    stats = result.stats
    seconds = stats.seconds
    return Sample(
        session=session,
        round=number,
        order=order,
        at=at,
        seed=seed,
        text=seconds.text,
        prefill=seconds.prefill,
        decode=seconds.decode,
        pixels=seconds.pixels,
        total=seconds.total,
        wall=wall,
        images=stats.images,
        tokens=stats.tokens,
        steps=stats.steps,
        accepted_histogram=stats.accepted_histogram,
        total_variation=stats.total_variation,
        energy_mj=None if before is None or after is None else float(after - before),
        others_cpu=load.others(),
    )
