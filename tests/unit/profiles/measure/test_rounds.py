"""What is left of a run: known before its last batch begins, and never begun anew."""

from __future__ import annotations

import pytest
from support.runs import change_samples, invented_cell, strategies

from lantern_accel_profiles.measure.record import Cell, Plan, Warmup
from lantern_accel_profiles.measure.samples import COLD, WARM, request_seconds, seconds_left

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
    assert request_seconds(one, [one]) == 2.0
    warm = untouched()
    warm.warmup = [Warmup(session=1, seconds=s) for s in (30.0, 3.0, 2.5)]
    assert request_seconds(warm, [warm]) == 2.5
    assert request_seconds(untouched(), [untouched()]) is None


def test_what_has_not_run_is_taken_for_its_like_by_images() -> None:
    known = [cell("vanilla", wall=2.0), cell("eagle", wall=1.0)]
    assert request_seconds(untouched("eagle", 4), known) == 4.0
    assert request_seconds(untouched("lantern++", 4), known) == 6.0


def test_everything_that_is_left_counts_from_the_start() -> None:
    running, later = cell(samples=4), untouched("vanilla", 4)
    alone = seconds_left([running], PLAN, session=1)
    assert alone == 6 * 2.0
    assert seconds_left([running, later], PLAN, session=1) == alone + (10 + COLD) * 8.0
    assert seconds_left([running], PLAN, session=1, images=16) == alone + 16 * 2.0
    # After a break warm-up is repeated.
    assert seconds_left([running], PLAN, session=2) == alone + WARM * 2.0
    assert seconds_left([later], PLAN, session=1) is None


def test_a_cell_that_is_to_run_for_seconds_does() -> None:
    one = cell(samples=10)
    assert seconds_left([one], PLAN, session=1) == 0
    assert seconds_left([one], PLAN.model_copy(update={"seconds": 50.0}), session=1) == 30.0
    quick = cell(wall=0.001, samples=10)
    long = PLAN.model_copy(update={"seconds": 50.0})
    assert seconds_left([quick], long, session=1) == pytest.approx(0.29)  # 300 samples at most


def test_it_shrinks_while_samples_are_taken() -> None:
    left = [seconds_left([cell(samples=n), untouched("eagle")], PLAN, 1) for n in range(1, 11)]
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == len(left)
