"""What is left of a run: known before its last batch begins, and never begun anew."""

from __future__ import annotations

import pytest
from support.runs import change_samples, invented_cell, strategies

from lantern_accel_profiles.measure.record import Cell, Plan, Warmup
from lantern_accel_profiles.measure.samples import COLD, seconds_left

PLAN = Plan(quick=True, samples=10, seconds=0, quality_images=0)


def cell(name: str = "vanilla", batch: int = 1, wall: float = 2.0, samples: int = 4) -> Cell:
    found = invented_cell(strategies([name])[0], batch, 300.0, samples=samples)
    change_samples([found], wall=wall)
    return found


def untouched(name: str = "vanilla", batch: int = 1) -> Cell:
    return invented_cell(strategies([name])[0], batch, 300.0, samples=0, warmup=[])


def test_a_request_takes_what_the_last_ones_took() -> None:
    one = cell(samples=8)
    one.samples[0].wall = 90.0  # long ago
    assert seconds_left([one], PLAN) == 2 * 2.0
    warm = untouched()
    warm.warmup = [Warmup(session=1, seconds=s) for s in (30.0, 3.0, 2.0)]
    assert seconds_left([warm], PLAN) == (10 + COLD - 3) * 2.5
    assert seconds_left([untouched()], PLAN) is None


def test_everything_that_is_left_counts_from_the_start() -> None:
    running, later = cell(samples=4), untouched("eagle", 4)
    assert seconds_left([running], PLAN) == 6 * 2.0
    # What has not run is taken for its like by images.
    assert seconds_left([running, later], PLAN) == 6 * 2.0 + (10 + COLD) * 8.0
    assert seconds_left([running], PLAN, images=16) == 6 * 2.0 + 16 * 2.0


def test_a_cell_that_is_to_run_for_seconds_does() -> None:
    one = cell(samples=10)
    assert seconds_left([one], PLAN) == 0
    long = PLAN.model_copy(update={"seconds": 50.0})
    assert seconds_left([one], long) == 30.0
    assert seconds_left([cell(wall=0.001, samples=10)], long) == pytest.approx(0.29)  # 300 at most
