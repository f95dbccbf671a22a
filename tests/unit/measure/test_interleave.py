"""Races: alternate laps, resumed ones, and what a report refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import RequestError
from lantern_accel.measure.interleave import (
    Lap,
    Race,
    Runner,
    Work,
    environment,
    race,
    read_stored,
    relative_spread,
)


def _report(*names: str) -> Race:
    return Race(
        settings={"size": "B"},
        environment={},
        runners=[Runner(name=name) for name in names],
    )


def test_runners_alternate_and_take_turns_in_going_first() -> None:
    order: list[str] = []

    def work(name: str) -> Work:
        order.append(name)
        return {"tokens": 10}

    runners = {name: partial(work, name) for name in "abc"}
    with open_backend("cpu") as backend:
        report = race(backend, _report(*"abc"), runners, repeats=3)
    assert order[:3] == ["a", "b", "c"]  # the warm-ups
    assert order[3:] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [len(one.laps) for one in report.runners] == [3, 3, 3]
    assert all(one.first_seconds is not None for one in report.runners)
    assert report.table().count("\n") == 4


def test_an_interrupted_race_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    left = 4

    def work() -> Work:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return {"tokens": 10}

    with open_backend("cpu") as backend:
        with pytest.raises(KeyboardInterrupt):
            race(backend, _report("a", "b"), {"a": work, "b": work}, repeats=3, out=out)
        stored = read_stored(out, Race, {"size": "B"})
        before = [len(one.laps) for one in stored.runners]
        assert before == [1, 1]
        left = 100
        again = race(backend, stored, {"a": work, "b": work}, repeats=3, out=out)
    assert [len(one.laps) for one in again.runners] == [3, 3]
    assert 100 - left == 6  # two warm-ups and the four laps that were missing
    assert again.runners[0].laps[0] == stored.runners[0].laps[0]


def test_a_report_of_other_settings_or_another_kind_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "race.json"
    out.write_text(_report("a").model_dump_json())
    with pytest.raises(RequestError, match="measured with size 'B', not 'XL'; name another file"):
        read_stored(out, Race, {"size": "XL"})
    with pytest.raises(RequestError, match="measured with size 'B', not None"):
        read_stored(out, Race, {})
    out.write_text("{}")
    with pytest.raises(RequestError, match="is not a Race of this version"):
        read_stored(out, Race, {})


def test_a_runner_may_time_itself_and_units_are_told_apart() -> None:
    lap = Lap(seconds=2.0, cpu_seconds=4.0, work={"steps": 100, "tokens": 400})
    with open_backend("cpu") as backend:
        report = race(backend, _report("a"), {"a": lambda: lap}, repeats=2)
    (runner,) = report.runners
    assert runner.laps == [lap, lap]
    assert runner.ms("steps") == pytest.approx(20)
    assert runner.ms("tokens", cpu=True) == pytest.approx(10)
    assert [row.split("|")[2].strip() for row in report.table().splitlines()[2:]] == [
        "steps",
        "tokens",
    ]


def test_the_spread_is_half_the_middle_half() -> None:
    assert relative_spread([2.0]) == 0
    assert relative_spread([1.0, 3.0]) == 0.5
    assert relative_spread([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx((52 - 1.5) / 2 / 3)


def test_the_environment_names_device_and_threads() -> None:
    with open_backend("cpu") as backend:
        found = environment(backend, torch.bfloat16)
    assert found["device"]["backend"] == "cpu"
    assert found["dtype"] == "bfloat16"
    assert found["threads"] == torch.get_num_threads()
