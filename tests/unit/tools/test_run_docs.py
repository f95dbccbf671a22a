"""Every command of README and docs is run on this machine, or left out with a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import run_docs as tool

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found() -> Any:
    return [one for page in tool.pages() for one in tool.commands(page)]


def test_every_reason_is_one_for_some_command(found: Any) -> None:
    for pattern, why in tool.LEFT_OUT.items():
        assert any(re.search(pattern, one.text) for one in found), f"{pattern}: {why}"
    for where, what, _ in tool.SMALLER:
        assert any(re.search(where, one.text) and re.search(what, one.text) for one in found), where


def test_a_command_is_made_smaller_and_never_another() -> None:
    assert tool.smaller("lantern-accel conform cpu --only static --only decode").split() == (
        ["lantern-accel", "conform", "cpu", "--only", "kv.round_trip"]
    )
    assert tool.smaller("lantern-accel devices") == "lantern-accel devices"
    assert "--repeats 1" in tool.smaller("lantern-accel bench --repeats 8 -o a.json")
    assert "8" not in tool.smaller("lantern-accel bench --repeats 8 -o a.json")


def test_a_command_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nlantern-accel devices nowhere\nlantern-accel hardware\n```\n")
    monkeypatch.setattr(tool, "pages", lambda: [page])
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "furnish", lambda folder: None)
    assert tool.main([]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "no backend is named 'nowhere'" in out
    assert "works" in out.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    "which", [["--page", "README.md"], ["--sample", "1"]], ids=["first", "rest"]
)
def test_the_commands_of_pages_work(which: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = tool.main(which)
    assert code == 0, capsys.readouterr().out
