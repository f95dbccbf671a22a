"""The table that `bench` prints: a verdict for every row, and no wider than 100 columns."""

from __future__ import annotations

import io
import re
import sys

import pytest
from support.runs import invented_run

from lantern_accel_profiles.commands.tables import show_markdown
from lantern_accel_profiles.report.table import table


def test_every_row_has_a_verdict_and_the_table_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = table(invented_run())
    head, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    at = [cell.strip() for cell in head.split("|")].index("verdict")
    verdicts = [row.split("|")[at].strip() for row in rows]
    assert len(verdicts) > 1 and verdicts[0] == "baseline"
    assert set(verdicts[1:]) <= {"faster", "slower", "same", "not shown", "not judged"}
    drawn = Terminal()
    monkeypatch.setattr(sys, "stdout", drawn)
    monkeypatch.setenv("COLUMNS", "100")
    show_markdown(text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn.getvalue())
    assert max(map(len, plain.splitlines())) <= 100
    assert "wider" not in plain
