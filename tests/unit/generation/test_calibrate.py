"""Timing the lengths of an engine: a slow moment of the machine is no reason to leave a length out."""

from __future__ import annotations

import pytest
from support.engines import engine_of
from support.moving import SAMPLING, begin
from support.tiny import tiny_models

from lantern_accel.device.backend import Stopwatch
from lantern_accel.generation.calibrate import calibrate
from lantern_accel.generation.decision import Estimate
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Strategy, Window

LENGTHS = (1, 2, 4)
#: Tokens that a step of each length brings, and seconds that it takes, long enough to be timed alone.
WORTH = {1: 1.0, 2: 1.5, 4: 2.0}
SECONDS = {1: 0.010, 2: 0.011, 4: 0.013}


#: A length, and its timings that take ten times as long.
SLOW = [(0, range(0)), (2, range(1, 3)), (4, range(3, 5)), (4, range(99))]


@pytest.mark.parametrize(("length", "slow"), SLOW, ids=["never", "two", "four", "four, always"])
def test_costs_are_what_steps_take_in_their_fastest_moments(length: int, slow: range) -> None:
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
            self.seconds = SECONDS[now] * (10 if now == length and seen[now] in slow else 1)

    found = Estimate.of(strategy, calibrate(engine, lambda: Watch(lambda: None))).strategy
    costs = {one.length: one.cost for one in found.lengths}
    assert costs == pytest.approx({1: 1.0, 2: 1.1, 4: 13.0 if len(slow) > 9 else 1.3})
