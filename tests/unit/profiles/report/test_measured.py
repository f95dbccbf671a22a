"""The runs that are committed can be read, compared, and are of the weights that are bundled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lantern_accel
from lantern_accel.device.datasheets import profiles_dir
from lantern_accel_profiles.measure.reading import check_comparable, read_run
from lantern_accel_profiles.report.rows import clock_jumps

MEASURED = sorted((profiles_dir() / "measured").glob("*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_a_committed_run_is_whole_and_of_the_bundled_weights(path: Path) -> None:
    run = read_run(path)
    assert run.state == "complete"
    assert not any(clock_jumps(cell.samples) for cell in run.cells)
    if run.settings.model == "lantern-emoji":
        with lantern_accel.load("lantern-emoji", device="cpu") as pipeline:
            assert run.settings.weights_hash == pipeline.model.weights_hash, (
                f"the bundled model is another one now; measure again: {run.command}"
            )


def test_committed_runs_may_be_compared() -> None:
    check_comparable([read_run(path) for path in MEASURED], [path.name for path in MEASURED])


def test_committed_measurements_name_no_machine() -> None:
    for path in profiles_dir().rglob("*.json"):
        assert not re.search(r"/(home|work|root|tmp|srv|Users)/", path.read_text()), path.name
