"""Measures cells: the cold decoding, memory and phases of one, its timed samples, and their turns.

In turns, whatever disturbs a machine for a while disturbs everything that is compared. The time left is
estimated again after every sample: cells that run later, quality losses included, count from the
start, so that it shrinks instead of beginning again with every batch size.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.capture import Replay
from lantern_accel.device.context import inferring
from lantern_accel.generation.pipeline import CapturedEngine, Pipeline, Prompt
from lantern_accel.generation.result import GenerationResult
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.measure.environment import LoadWatch
from lantern_accel_profiles.measure.record import (
    STEP_PHASES,
    Cell,
    MemoryPeak,
    Plan,
    Sample,
    Warmup,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.measure.work import timed_phases

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


def engine_of(pipeline: Pipeline, cell: Cell) -> CapturedEngine:
    """Return a cell's engine with its captured functions."""
    sampling = pipeline.sampling(temperature=cell.temperature)
    shape = pipeline.model.family.usual_shape(pipeline.model)
    return pipeline.engine(cell.batch, cell.strategy, sampling, shape)


@contextmanager
def in_place(engine: Engine, functions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Let an engine run other functions of some names inside the block."""
    before = engine.functions
    engine.functions = {**before, **functions}
    try:
        yield
    finally:
        engine.functions = before


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
    engine_of(pipeline, cell).engine.step()
    backend.synchronize()
    after = backend.counters()
    gains = {name: count - before.get(name, 0) for name, count in after.items()}
    rising = {name: gain for name, gain in gains.items() if gain > 0}
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
def measure_cold(pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], session: int) -> None:
    """Measure a cell with nothing kept from before: first decoding, memory, phases."""
    backend = pipeline.backend
    pipeline.release_engines()
    first = warm_up(pipeline, cell, prompts, 0, session)
    ready = engine_of(pipeline, cell)
    cell.cold_seconds = first.seconds
    steps = ready.replays
    cell.captured, cell.capture_kind = all(one.captured for one in steps), steps[-1].how
    cell.capture_seconds = sum(one.seconds for one in (ready.prefill, *steps))
    cell.capture_bytes = sum(one.nbytes for one in (ready.prefill, *steps))
    backend.memory(new_peak=True)
    cell.warmup = [first, warm_up(pipeline, cell, prompts, 1, session)]
    use = backend.memory()
    cell.memory = MemoryPeak(
        peak_bytes=not_measured(f"backend {backend.name!r} reads no peak")
        if use.peak is None
        else float(use.peak),
        definition=use.definition or "as the backend's memory() counts it",
        buffers_bytes=ready.engine.nbytes,
    )
    spent = [one.tracing() for one in steps]
    cell.tracing_seconds = max((one for one in spent if one is not None), default=None)
    # auto may have measured again and have another engine now: steps are of the one that decodes.
    ready = engine_of(pipeline, cell)
    cell.step_ms, cell.step_ms_from = _step_ms(pipeline, cell, prompts, ready)


def _step_ms(
    pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], ready: CapturedEngine
) -> tuple[dict[str, float], Literal["eager", "recording"]]:
    """Return milliseconds per step by phase, and what was timed.

    A recording that keeps its phases apart is timed itself; else the Python step is, whose phases have
    edges at which the device can be waited for.
    """
    texts = batch_prompts(prompts, cell.batch, 0)
    sampling = pipeline.sampling(temperature=cell.temperature)

    def once() -> tuple[float, int]:
        done, seconds = pipeline.decode_only(texts, cell.strategy, sampling, 0)
        return seconds, max(int(done.steps.max()), 1)

    apart = cell.captured and all(one.time_phases() is not None for one in ready.replays)
    if apart:
        sums = dict.fromkeys(STEP_PHASES, 0.0)

        def add_times(part: Replay) -> None:
            for name, seconds in (part.time_phases() or {}).items():
                sums[name] = sums.get(name, 0.0) + seconds

        functions = ready.engine.functions
        parts = {
            n: partial(add_times, one) for n, one in functions.items() if isinstance(one, Replay)
        }
        with in_place(ready.engine, parts | {"prefill": ready.prefill}):
            seconds, steps = once()
    else:
        # What is not captured runs with what the device sets for a step.
        eager = ready.engine.host_functions() if cell.captured else {}
        with in_place(ready.engine, eager):
            if cell.captured:
                once()  # what was captured has not run eagerly before
            with timed_phases(pipeline.backend) as sums:
                seconds, steps = once()
    # Prefill is in these seconds; the samples tell what it takes, and the report takes it off.
    split = dict(sums) | {"host": max(seconds - sum(sums.values()), 0.0)}
    return {name: 1e3 * s / steps for name, s in split.items()}, "recording" if apart else "eager"


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
    load = LoadWatch()
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
            **stats.seconds.model_dump(exclude={"measuring"}),
            wall=wall,
            images=stats.images,
            tokens=stats.tokens,
            steps=stats.steps,
            accepted_histogram=stats.accepted_histogram,
            total_variation_per_token=stats.total_variation_per_token,
            energy_mj=None if before is None or after is None else float(after - before),
            others_cpu=load.others(),
        )
    )


# --- turns, and what is left ----------------------------------------------------------------------

Entry = TypeVar("Entry")
#: Requests whose median stands for the next one: what disturbed the machine long ago does not count.
RECENT = 5
#: Timed samples per cell at most, however fast the device is.
MOST_SAMPLES = 300
#: Decodings that a cell usually takes before its first sample.
COLD = 7


def interleave(
    entries: Sequence[Entry],
    taken: Callable[[Entry], int],
    done: Callable[[Entry], bool],
    seed: int = 0,
) -> Iterator[Entry]:
    """Yield entries in rounds, each once per round, in an order that changes from round to round.

    ``taken(entry)`` counts the samples that an entry has: whoever has fewest is in the round, so that an
    interrupted series goes on with the round that it broke off. The caller takes one sample of each
    entry that it gets.
    """
    while waiting := [entry for entry in entries if not done(entry)]:
        number = min(taken(entry) for entry in waiting)
        order = [entry for entry in waiting if taken(entry) == number]
        random.Random(f"{seed}/{number}").shuffle(order)
        yield from order


def about(seconds: float) -> str:
    """Return a duration in words, as rough as an estimate is."""
    if seconds < 90:
        return f"about {max(round(seconds / 10), 1) * 10} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def seconds_left(cells: Sequence[Cell], plan: Plan, images: int = 0) -> float | None:
    """Return the seconds until every cell has its samples, and ``images`` more for quality.

    A cell that has not run is taken for the median cell, in proportion to its images. None: nothing has
    run yet.
    """
    rates = []
    for cell in cells:
        recent = [s.wall for s in cell.samples[-RECENT:] if is_measured(s.wall)]
        recent = recent or [w.seconds for w in cell.warmup[1:]]
        rates.append(statistics.median(recent) / cell.batch if recent else None)
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    usual = statistics.median(known)
    total = images * usual
    for cell, rate in zip(cells, rates, strict=True):
        each = cell.batch * (rate or usual)
        wanted = max(plan.samples, min(plan.seconds / each, MOST_SAMPLES))
        first = 0 if cell.samples else max(COLD - len(cell.warmup), 0)
        total += each * (max(wanted - len(cell.samples), 0) + first)
    return total
