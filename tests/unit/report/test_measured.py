"""The runs that are committed can be read, compared, and are of the weights that are bundled."""

from __future__ import annotations

from pathlib import Path

import pytest

import lantern_accel
from lantern_accel.device.datasheets import profiles_dir
from lantern_accel.report.reading import check_comparable, read_run

MEASURED = sorted((profiles_dir() / "measured").glob("*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_a_committed_run_is_whole_and_of_the_bundled_weights(path: Path) -> None:
    run = read_run(path)
    assert run.state == "complete"
    assert not run.migrated_from
    if run.settings.model == "lantern-emoji":
        with lantern_accel.load("lantern-emoji", device="cpu") as pipeline:
            assert run.settings.weights_hash == pipeline.model.weights_hash, (
                f"the bundled model is another one now; measure again: {run.command}"
            )


def test_committed_runs_may_be_compared() -> None:
    check_comparable([read_run(path) for path in MEASURED], [path.name for path in MEASURED])


def test_the_committed_benchmarks_are_still_read() -> None:
    found = sorted((profiles_dir() / "bench").glob("*.json"))
    assert all(read_run(path).migrated_from for path in found)
