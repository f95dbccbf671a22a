"""A run that breaks the protocol is not a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.runs import invented_cell, invented_run, strategies

from lantern_accel_profiles.measure.record import (
    STEP_PHASES,
    Interval,
    Run,
    Warmup,
    is_measured,
    not_measured,
)


def test_a_figure_that_is_not_there_says_why() -> None:
    text = not_measured("the meter is broken")
    assert not is_measured(text)
    assert is_measured(0.0)
    cell = invented_cell(strategies()[0], 1, 300.0, cold_seconds=text)
    assert cell.cold_seconds == "not measured: the meter is broken"
    with pytest.raises(ValidationError):
        invented_cell(strategies()[0], 1, 300.0, cold_seconds="unknown")


def test_a_step_has_every_phase() -> None:
    usual = invented_cell(strategies()[0], 1, 300.0)
    assert isinstance(usual.step_ms, dict)
    for phase in STEP_PHASES:
        less = {name: value for name, value in usual.step_ms.items() if name != phase}
        with pytest.raises(ValidationError, match=f"a step has no {phase}"):
            invented_cell(strategies()[0], 1, 300.0, step_ms=less)


def test_an_interval_has_its_ends_in_order() -> None:
    with pytest.raises(ValidationError, match="runs from 3"):
        Interval(value=2, low=3, high=1, n=4)


@pytest.mark.parametrize(
    ("warm", "session", "fragment"),
    [
        *((warm, 1, f"after {warm} warm-up decodings") for warm in range(3)),
        (4, 2, "session 2 after 0 warm-up"),  # every session warms up for itself
    ],
)
def test_samples_without_warm_up_are_refused(warm: int, session: int, fragment: str) -> None:
    cell = invented_cell(strategies()[0], 1, 300.0, warmup=[Warmup(session=1, seconds=1.0)] * warm)
    cell.samples[-1] = cell.samples[-1].model_copy(update={"session": session})
    with pytest.raises(ValidationError, match=fragment):
        invented_run(cells=[cell])


def test_a_complete_run_prices_every_relaxed_strategy() -> None:
    with pytest.raises(ValidationError, match=r"lantern\+\+.*without its quality figures"):
        invented_run(names=["vanilla", "lantern++"], quality=[])
    running: dict[str, Any] = {"state": "interrupted", "quality": []}
    assert invented_run(names=["vanilla", "lantern++"], **running).quality == []


def test_a_price_at_another_temperature_is_no_price() -> None:
    run = invented_run(names=["vanilla", "lantern++"])
    other = [q.model_copy(update={"temperature": 0.5}) for q in run.quality]
    with pytest.raises(ValidationError, match="without its quality figures"):
        Run.model_validate(run.model_copy(update={"quality": other}).model_dump())
