"""Measuring one cell: the cold decoding, its memory, its phases, its work, and one timed sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from lantern_accel.decoding.buckets import Steps
from lantern_accel.device.backend import inferring
from lantern_accel.device.capture import Replay
from lantern_accel.generation.pipeline import CapturedEngine, Pipeline, Prompt
from lantern_accel.generation.result import GenerationResult
from lantern_accel.measure.environment import HostLoad
from lantern_accel.measure.record import (
    STEP_PHASES,
    Cell,
    Memory,
    Sample,
    Warmup,
    Work,
    not_measured,
)
from lantern_accel.measure.work import measure_work, timed_phases
from lantern_accel.strategy.values import Strategy

#: Warm-up ends at the latest after this many rounds, in a quick run after fewer ...
MOST_WARMUPS = 12
QUICK_WARMUPS = 4
#: ... and when the best of the last two is not this much faster than the best before them.
GAIN = 0.05


def new_cell(strategy: Strategy, batch: int, temperature: float) -> Cell:
    """Return a cell that nothing was measured of yet."""
    gap = not_measured("the run ended before")
    return Cell(
        strategy=strategy,
        batch=batch,
        temperature=temperature,
        cold_seconds=gap,
        warmup=[],
        settled=False,
        memory=gap,
        step_ms=gap,
        work=gap,
    )


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


def ready_of(pipeline: Pipeline, cell: Cell) -> CapturedEngine:
    """Return a cell's engine with its captured functions."""
    sampling = pipeline.sampling(temperature=cell.temperature)
    shape = pipeline.model.family.usual_shape(pipeline.model)
    return pipeline.engine(cell.batch, cell.strategy, sampling, shape)


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
    ready_of(pipeline, cell).step()
    backend.synchronize()
    after = backend.counters()
    rising = {name: after[name] - before.get(name, 0) for name in after}
    return Warmup(
        session=session,
        seconds=seconds,
        rising={name: count for name, count in rising.items() if count > 0},
    )


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
    ready = ready_of(pipeline, cell)
    cell.cold_seconds = first.seconds
    cell.captured, cell.capture_kind = ready.step.captured, ready.step.how
    cell.capture_seconds = ready.prefill.seconds + ready.step.seconds
    cell.capture_bytes = ready.prefill.nbytes + ready.step.nbytes
    backend.reset_peak_memory()
    cell.warmup = [first, warm_up(pipeline, cell, prompts, 1, session)]
    use = backend.memory()
    cell.memory = Memory(
        peak_bytes=not_measured(f"backend {backend.name!r} reads no peak")
        if use.peak is None
        else float(use.peak),
        definition=use.definition or "as the backend's memory() counts it",
        buffers_bytes=ready.engine.nbytes,
    )
    cell.tracing_seconds = ready.step.tracing()
    # auto learns from each image, and may have another engine now: steps are of the one that decodes.
    ready = ready_of(pipeline, cell)
    cell.step_ms, cell.step_ms_from = _step_ms(pipeline, cell, prompts, ready)
    cell.work = _work(pipeline, ready)


def _step_ms(
    pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], ready: CapturedEngine
) -> tuple[dict[str, float], Literal["eager", "recording"]]:
    """Return milliseconds per step by phase, and what was timed.

    A recording that keeps its phases apart is timed itself; else the Python step is, whose phases have
    edges at which the device can be waited for.
    """
    texts = batch_prompts(prompts, cell.batch, 0)
    sampling = pipeline.sampling(temperature=cell.temperature)

    def once(step: Steps) -> tuple[float, int]:
        done, seconds = pipeline.decode_only(texts, cell.strategy, sampling, 0, step=step)
        return seconds, max(int(done.steps.max()), 1)

    apart = cell.captured and ready.step.timed() is not None
    if apart:
        sums = dict.fromkeys(STEP_PHASES, 0.0)

        def clocked(part: Replay) -> Callable[[], None]:
            def replay() -> None:
                for name, seconds in (part.timed() or {}).items():
                    sums[name] = sums.get(name, 0.0) + seconds

            return replay

        parts = {slots: one for slots, one in ready.steps.items() if isinstance(one, Replay)}
        seconds, steps = once({slots: clocked(one) for slots, one in parts.items()})
    else:
        eager: Steps = ready.steps  # with what the device sets for a step
        if cell.captured:
            eager = ready.engine.steps
            once(eager)  # what was captured has not run eagerly before
        with timed_phases(pipeline.backend) as sums:
            seconds, steps = once(eager)
    # Prefill is in these seconds; the samples tell what it takes, and the report takes it off.
    split = dict(sums) | {"host": max(seconds - sum(sums.values()), 0.0)}
    return {name: 1e3 * s / steps for name, s in split.items()}, "recording" if apart else "eager"


def _work(pipeline: Pipeline, ready: CapturedEngine) -> dict[str, Work] | str:
    try:
        return measure_work(ready.engine, pipeline.model.manifest)
    except (AttributeError, TypeError) as error:  # a family whose modules are of another make
        return not_measured(f"the model's sizes are not known to the roofline ({error})")


def take_sample(
    pipeline: Pipeline,
    cell: Cell,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    session: int = 0,
    order: int = 0,
    at: float = 0.0,
) -> None:
    """Serve one timed request and add its figures to the cell."""
    backend = pipeline.backend
    load = HostLoad()
    before = backend.energy_mj()
    began = time.perf_counter()
    stats = request(pipeline, cell, prompts, seed).stats
    wall = time.perf_counter() - began
    after = backend.energy_mj()
    cell.stands_for = stats.auto or ""
    cell.samples.append(
        Sample(
            session=session,
            round=len(cell.samples),
            order=order,
            at=at,
            seed=seed,
            **stats.seconds.model_dump(),
            wall=wall,
            images=stats.images,
            tokens=stats.tokens,
            steps=stats.steps,
            accepted_histogram=stats.accepted_histogram,
            total_variation=stats.total_variation,
            energy_mj=None if before is None or after is None else float(after - before),
            others_cpu=load.others(),
        )
    )
