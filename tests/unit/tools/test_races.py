"""The race says what is missing; what it times needs the official code next to it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import publish
import pytest
import race_official


def test_a_folder_without_the_official_code_is_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert race_official.main([str(tmp_path), "--device", "cpu"]) == 2
    assert "give the folder of a clone of" in capsys.readouterr().err


def test_what_is_published_is_measured_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = publish.prompts()
    assert [len(one) for one in asked.values()] == [24, 24]
    assert asked == publish.prompts() and not {*asked["composed"]} & {*asked["training list"]}
    order = []

    def draw(cell: Any, number: int, seed: int) -> tuple[float, float, float]:
        order.append(cell)
        return 1.0, 2.0, 0.0

    cells = [("vanilla", True, 1), ("auto", True, 1)]
    rows = publish.in_turns(cells, 2, (1,), draw)
    assert order == [*cells, *cells[::-1], *cells][:2] + order[2:]
    assert order[2:4] == order[4:][::-1], "the order of cells changes"
    assert [row["prompt"] for row in rows] == [0, 0, 1, 1]

    ran: list[str] = []
    fails = {"beside-B"}

    def part(command: list[str], **_: Any) -> Any:
        at = command.index("--part")
        ran.append(command[at + 1])
        bad = command[at + 1] in fails
        if not bad:
            Path(command[command.index("-o") + 1]).write_text(
                json.dumps([{"environment": {"device": {"name": "A (R) CPU", "cores": 2}}}])
            )
        return SimpleNamespace(returncode=int(bad))

    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "prompts", lambda count: asked)
    monkeypatch.setattr(publish.subprocess, "check_output", lambda *_, **__: "0" * 40)
    monkeypatch.setattr(publish.subprocess, "run", part)
    out = tmp_path / "a.json"
    assert publish.main(["--quick", "-o", str(out)]) == 1
    assert "not measured: beside-B.1" in capsys.readouterr().err and not out.is_file()
    assert len(ran) == 6
    fails.clear()
    ran.clear()
    assert publish.main(["--quick", "-o", str(out)]) == 0
    assert ran == ["beside-B"], "parts that are measured stay"
    made = json.loads(out.read_text())
    assert (made["commit"], made["kind"]) == ("0" * 40, "lantern_accel.published")
    with pytest.raises(SystemExit):
        publish.main(["-o", str(out)])  # the checkout has changes
