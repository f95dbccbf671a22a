"""``lantern-accel stepcost`` from the command line, on a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.profiles import small_ceilings

from lantern_accel.cli import main
from lantern_accel_profiles.measure import steps


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small_ceilings(monkeypatch)
    monkeypatch.setattr(steps, "ROWS", (1, 2, 4))


def test_a_table_a_file_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = tmp_path / "tiny.json"
    size.write_text(
        '{"dim": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "grid": 6, "prefix_length": 3}'
    )
    out = tmp_path / "cost.json"
    command = [
        "stepcost", "--size", str(size), "--device", "cpu", "--nodes", "4", "--repeats", "2",
        "--drafts", "0,1,00", "--top-k", "20", "-o", str(out),
    ]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr()
    assert "| verify 4 | 1 | 4 |" in said.out
    assert "lantern++, batch 1: capture" in said.err
    stored = json.loads(out.read_text())
    assert stored["environment"]["device"]["backend"] == "cpu"
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert [row["step"] for row in rows][:4] == ["vanilla", "verify 4", "lantern++", "pass 1"]
    assert all(row["ms"] / row["plain_ms"] == row["over_plain"] for row in rows)
    assert [row["rows"] for row in rows[3:]] == [1, 2, 4]
    assert "capture" not in said.err
    assert main(["compare", str(out), "-o", str(tmp_path / "r.md")]) == 2
    assert "steps alone" in capsys.readouterr().err
