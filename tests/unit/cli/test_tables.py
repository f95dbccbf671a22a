"""Tables are drawn on a terminal and stay Markdown in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from lantern_accel.cli import main
from lantern_accel.cli.console import bar, show_table
from lantern_accel.records import markdown_table
from lantern_accel_profiles.commands.tables import show_markdown

HEAD, ROWS = ["name", "speed", "a long column of words"], [["a", "1.0", "x"], ["b|c", "2", ""]]
TABLE = "\n".join(markdown_table(HEAD, ROWS))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(patch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """Put a terminal in the place of standard output, from within a test."""
    found = Terminal()
    patch.setattr(sys, "stdout", found)
    patch.setenv("COLUMNS", str(columns))
    return found


def test_a_pipe_gets_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(HEAD, ROWS)
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == [
        "| name | speed | a long column of words |", "|---|---|---|", "| a | 1.0 | x |",
    ]  # fmt: skip
    assert "| b/c | 2 |  |" in out
    show_markdown(f"before\n\n{TABLE}\nafter")
    assert capsys.readouterr().out == f"before\n\n{out}after\n"


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 100)
    show_markdown(f"before\n\n{TABLE}\nafter")
    out = shown.getvalue()
    assert out.startswith("before\n") and out.endswith("after\n")
    assert "│ a    │   1.0 │ x" in out and "|" not in out


@pytest.mark.parametrize(("bytes_", "says"), [(True, "1.0/2.0 MB"), (False, "1000000/2000000")])
def test_a_bar_counts_bytes_or_what_is_named(
    bytes_: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with bar("loading", False, unit="" if bytes_ else "tokens", bytes_=bytes_) as advance:
        assert advance is not None
        advance(10**6, 2 * 10**6)
    assert says in shown.getvalue()
    with bar("loading", True) as advance:
        assert advance is None


def test_a_terminal_gets_text_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 100)
    show_markdown("**Does it?** Yes.\n\n### Next\n- `one`")
    assert shown.getvalue() == "Does it? Yes.\n\nNext\n- one\n"


def test_a_narrow_terminal_gets_the_main_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 30)
    show_table(HEAD, ROWS, ["name", "speed"])
    out = shown.getvalue()
    assert "│ a    │   1.0 │" in out
    assert "in a wider terminal" in out and "a long column" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("memory", "code", "says"),
    [("24GB", 0, "fits: yes; batch size"), ("0.1GB", 1, "fits: no; batch size 0 at most")],
)
def test_a_plan_says_whether_it_fits(
    memory: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "plan", "lantern-emoji", "--memory", memory]) == code
    assert says in capsys.readouterr().out


def test_a_plan_of_memory_has_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "plan", "lantern-emoji"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "| MiB |" in rows[0]
    assert len(rows) > 4 and all(
        row.split("|")[2].strip().replace(",", "").isdigit() for row in rows[2:]
    )
