"""Races: alternate laps, and resumed ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from racing import Done, Race, Runner, race
from support.runs import invented_run

from lantern_accel.device.plugins import open_backend
from lantern_accel_profiles.store import resume


def _report(*names: str) -> Race:
    return Race(
        settings={"size": "B"},
        environment=invented_run().environment,
        runners=[Runner(name=name) for name in names],
    )


def test_runners_take_turns_in_an_order_that_changes() -> None:
    order: list[str] = []

    def work(name: str) -> Done:
        order.append(name)
        return {"tokens": 10}

    runners = {name: partial(work, name) for name in "abc"}
    with open_backend("cpu") as backend:
        report = race(backend, _report(*"abc"), runners, repeats=3)
    assert order[:3] == ["a", "b", "c"]  # the warm-ups
    rounds = [tuple(order[i : i + 3]) for i in (3, 6, 9)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert [len(one.laps) for one in report.runners] == [3, 3, 3]
    assert all(one.first_seconds is not None for one in report.runners)
    assert report.table().count("\n") == 4


def test_an_interrupted_race_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    left = 4

    def work() -> Done:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return {"tokens": 10}

    with open_backend("cpu") as backend:
        with pytest.raises(KeyboardInterrupt):
            race(backend, _report("a", "b"), {"a": work, "b": work}, repeats=3, out=out)
        stored = resume(out, _report("a", "b"), lambda r: r.settings)
        before = [len(one.laps) for one in stored.runners]
        assert before == [1, 1]
        left = 100
        again = race(backend, stored, {"a": work, "b": work}, repeats=3, out=out)
    assert [len(one.laps) for one in again.runners] == [3, 3]
    assert 100 - left == 6  # two warm-ups and the four laps that were missing
    assert again.runners[0].laps[0] == stored.runners[0].laps[0]
