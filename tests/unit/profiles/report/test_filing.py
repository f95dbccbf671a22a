"""Filing a run: what is refused, and where it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import invented_run

from lantern_accel.cli import main
from lantern_accel.files import write_json


def add(folder: Path, **changes: object) -> int:
    """File an invented run with these changes below a folder; return the exit code."""
    run = invented_run().model_copy(update=changes)
    write_json(folder / "run.json", run.model_dump(mode="json"))
    return main(["profiles", "add", str(folder / "run.json"), "--out", str(folder / "filed")])


def test_a_whole_run_is_filed_once_under_its_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(tmp_path) == 0
    name = "abacus-abacus-10-rods-tiny-bfloat16.json"
    assert [path.name for path in (tmp_path / "filed").iterdir()] == [name]
    assert f"filed: {tmp_path / 'filed' / name}" in capsys.readouterr().out
    assert add(tmp_path) == 2
    assert "--overwrite" in capsys.readouterr().err
    words = ["profiles", "add", str(tmp_path / "run.json"), "--out", str(tmp_path / "filed")]
    assert main([*words, "--overwrite"]) == 0


def test_what_cannot_be_filed_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = invented_run().clock.model_copy(update={"ratio": 0.4})
    short = invented_run()
    short.cells[0].samples = short.cells[0].samples[:1]
    for changes, fragment in (
        ({"state": "interrupted"}, "--resume"),
        ({"cells": [], "quality": []}, "no measurement"),
        ({"cells": short.cells}, "vanilla, batch 1, temperature 1: it has 1 samples"),
        ({"clock": "not measured: a test"}, "was not checked"),
        ({"clock": clock}, "0.40"),
    ):
        assert add(tmp_path, **changes) == 2
        assert fragment in capsys.readouterr().err, changes
    assert not (tmp_path / "filed").exists()


def test_measured_runs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    assert "lantern-emoji" in capsys.readouterr().out
