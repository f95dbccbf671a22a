"""The racing scripts say what is missing; what they time needs the official code beside them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize("script", ["race_official.py", "race_lantern.py"])
def test_a_folder_without_the_official_code_is_an_error(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TOOLS)  # as `python tools/SCRIPT` has it
    main = runpy.run_path(str(TOOLS / script))["main"]
    assert main([str(tmp_path), "--device", "cpu"]) == 2
    assert "give the folder of a clone of" in capsys.readouterr().err
