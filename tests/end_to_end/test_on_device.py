"""``tools/on_device.py``: stages in processes of their own, a report, and what a failure leaves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.tools import tool_module

TOOL = Path(__file__).resolve().parents[2] / "tools/on_device.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    return tool_module("on_device")


@pytest.mark.long
def test_a_device_is_checked_and_a_second_run_goes_on(tool, tmp_path: Path, capsys) -> None:
    arguments = ["--device", "cpu", "-o", str(tmp_path), "--quick", "--only", "device"]
    assert tool.main([*arguments, "--only", "conform", "--only", "kernels"]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "- backend: cpu" in report
    assert " passed" in report
    outcomes = json.loads((tmp_path / "conform.json").read_text())["outcomes"]
    assert {one["name"].partition(".")[0] for one in outcomes} == {
        "kv",
        "operation",
        "attention",
        "accept",
    }
    assert json.loads((tmp_path / "kernels.json").read_text())["outcomes"] == []  # it has none
    assert capsys.readouterr().out.count("running") == 3
    assert tool.main(arguments) == 0
    assert "device (1 of" in (out := capsys.readouterr().out)
    assert "running" not in out


@pytest.mark.long
def test_a_stage_that_fails_is_reported_with_its_reason(tool, tmp_path: Path, capsys) -> None:
    arguments = ["--device", "null", "-o", str(tmp_path), "--only", "device", "--only", "generate"]
    assert tool.main(arguments) == 4  # a device's
    assert "stages failed: generate; their logs are in" in capsys.readouterr().err
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["device"] == "null"
    assert "shapes and no data, so it generates nothing" in found["stages"]["generate"]["text"]
    assert "shapes and no data" in (tmp_path / "generate.log").read_text()


def test_what_cannot_be_done_is_told_before_any_work(tool, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "never"
    assert tool.main(["--device", "nothing", "-o", str(folder)]) == 2
    assert "no backend is named 'nothing'" in capsys.readouterr().err
    assert tool.main(["--device", "cpu", "-o", str(folder), "--only", "benhc"]) == 2
    assert "no stage is named 'benhc'; did you mean bench?" in capsys.readouterr().err
    assert not folder.exists()


def test_every_stage_is_a_command_with_these_options(tool, tmp_path: Path) -> None:
    """A renamed option would be noticed only on a card."""
    import typer.main
    import typer.testing

    from lantern_accel.cli.app import app

    runner = typer.testing.CliRunner()
    for stage in tool.stages("cpu", tmp_path, False, seconds=300.0) + tool.stages(
        "cpu", tmp_path, True
    ):
        if stage.script:
            script = importlib.import_module(f"tools.{Path(stage.script).stem}")
            one = typer.Typer()
            one.command()(getattr(script, Path(stage.script).stem))
            text = runner.invoke(one, ["--help"]).output
        else:
            text = runner.invoke(app, [stage.arguments[0], "--help"]).output
        for argument in [*stage.arguments[1:], *stage.extra, *filter(None, [stage.resume])]:
            if argument.startswith("--"):
                assert argument.partition("=")[0] in text, (stage.name, argument)
