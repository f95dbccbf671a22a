"""Times steps of every length of an engine, and counts the tokens that they add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Stopwatch
from lantern_accel.generation import auto_constants as auto


def count(engine: Engine, length: int, steps: int) -> tuple[int, int]:
    """Take some steps of one length; return the tokens gained and the steps, summed over images.

    A request was started before, and must be started again.
    """
    engine.now = max(engine.lengths)  # what prefill has prepared
    engine.move(length)
    for _ in range(steps):
        engine.step()
    return int(engine.state.length.cpu().sum()), int(engine.state.steps.cpu().sum())


def calibrate(
    engine: Engine,
    watch: Callable[[], Stopwatch],
    rounds: int = auto.ROUNDS,
    least: float = auto.ROUNDS_MS,
) -> dict[int, list[float]]:
    """Time steps of every length in turns, milliseconds; the request must be started again.

    It takes ``rounds`` turns, and more until ``least`` milliseconds have passed. A length that should
    add far fewer tokens than the best is left out; where it is the longer one, all longer ones are, too.
    """
    times: dict[int, list[float]] = {}
    lengths = [one.length for one in engine.draft_lengths]
    tokens_per_step = {p.length: p.tokens_per_step or 1.0 for p in engine.draft_lengths}
    number, spent = 0, 0.0
    while number <= rounds or (spent < least and number <= auto.MOST_ROUNDS):
        for length in list(lengths):
            times.setdefault(length, []).append(step_ms(engine, length, watch))
            spent += times[length][-1]
            if length == 1 or not (number or engine.source.returns):  # a first step may be slow
                continue
            for _ in range(auto.SECOND_LOOKS):  # so may any on a busy machine
                if not (best := _better(length, times, tokens_per_step)):
                    break
                times[length].append(step_ms(engine, length, watch))
            if best := _better(length, times, tokens_per_step):
                past = length > best
                lengths = [n for n in lengths if n < length or (n > length and not past)]
                if past:
                    break
        if not number:  # the first round warms up
            times = {n: found for n, found in times.items() if n not in lengths}
        number += 1
    return times


def step_ms(engine: Engine, length: int, watch: Callable[[], Stopwatch]) -> float:
    """Time a step of one length, milliseconds: of several in a row, if steps are short."""
    # Drafts that return find other steps' data in the caches at first.
    for _ in range(2 if engine.source.returns else 1):
        engine.state.rewind(engine.geometry.tokens // 2, pending=length)
        engine.move(length)
        with watch() as one:
            engine.step()
    steps = min(math.ceil(auto.STEP_MS / (1e3 * one.seconds or auto.STEP_MS)), auto.MOST_STEPS)
    if steps == 1:
        return 1e3 * one.seconds
    with watch() as all_:
        for _ in range(steps):
            engine.step()
    return 1e3 * all_.seconds / steps


def _better(
    length: int, times: Mapping[int, Sequence[float]], tokens_per_step: Mapping[int, float]
) -> int | None:
    """Return the fastest length where this one is predicted to be far slower; else None."""
    speeds = {n: tokens_per_step.get(n, 1.0) / min(found) for n, found in times.items()}
    best = max(speeds, key=lambda one: speeds[one])
    return best if speeds[length] < auto.HOPELESS * speeds[best] else None
