"""Timing the lengths of an engine: a slow moment of the machine is no reason to leave a length out."""

from __future__ import annotations

import pytest
from support.engines import engine_of
from support.moving import SAMPLING, begin
from support.tiny import tiny_models

from lantern_accel.device.backend import Stopwatch
from lantern_accel.generation.calibrate import calibrate
from lantern_accel.generation.estimate import Estimate
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Strategy, Window

LENGTHS = (1, 2, 4)
#: Tokens that a step of each length brings, and seconds that it takes, long enough to be timed alone.
WORTH = {1: 1.0, 2: 1.5, 4: 2.0}
SECONDS = {1: 0.010, 2: 0.011, 4: 0.013}


def timed(seconds: dict[int, float], slow: tuple[int, range] = (0, range(0))) -> dict[int, float]:
    """Return the costs found where a length takes ten times as long at some of its timings."""
    models = tiny_models(2, vocab=5, grid=3, prefix=2, dim=8, sharpness=1.0)
    lengths = tuple(DraftLength(length=n, tokens_per_step=WORTH[n]) for n in LENGTHS)
    strategy = Strategy(drafts=Window(length=4, draft_lengths=lengths))
    engine = engine_of(models, strategy, SAMPLING)
    begin(engine)
    seen = dict.fromkeys(LENGTHS, 0)

    class Watch(Stopwatch):
        def __exit__(self, *given: object) -> None:
            now = engine.now
            seen[now] += 1
            often = 10 if now == slow[0] and seen[now] in slow[1] else 1
            self.seconds = seconds[now] * often

    found = Estimate.of(strategy, calibrate(engine, lambda: Watch(lambda: None))).strategy
    return {one.length: one.cost for one in found.lengths if one.cost is not None}


def test_costs_are_what_steps_take() -> None:
    assert timed(SECONDS) == pytest.approx({1: 1.0, 2: 1.1, 4: 1.3})


@pytest.mark.parametrize(("length", "first"), [(2, 1), (4, 3)])
def test_a_slow_moment_takes_no_length_out(length: int, first: int) -> None:
    found = timed(SECONDS, (length, range(first, first + 2)))
    assert found == pytest.approx({1: 1.0, 2: 1.1, 4: 1.3})


def test_a_length_that_is_always_slow_keeps_its_cost() -> None:
    dear = {**SECONDS, 4: 0.2}
    assert timed(dear) == pytest.approx({1: 1.0, 2: 1.1, 4: 20.0})
