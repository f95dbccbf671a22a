"""The race says what is missing; what it times needs the official code next to it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


def test_a_folder_without_the_official_code_is_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TOOLS)  # as `python tools/race_official.py` has it
    main = runpy.run_path(str(TOOLS / "race_official.py"))["main"]
    assert main([str(tmp_path), "--device", "cpu"]) == 2
    assert "give the folder of a clone of" in capsys.readouterr().err
