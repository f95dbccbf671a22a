"""Tables are drawn on a terminal and stay Markdown in a pipe; slow choices are told."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_accel.cli.console import markdown, show_markdown, show_table
from lantern_accel.cli.generate import remark

HEAD, ROWS = ["name", "speed", "a long column of words"], [["a", "1.0", "x"], ["b|c", "2", ""]]


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
    show_markdown(f"before\n\n{markdown(HEAD, ROWS)}\nafter")
    assert capsys.readouterr().out == f"before\n\n{out}after\n"


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, 100)
    show_markdown(f"before\n\n{markdown(HEAD, ROWS)}\nafter")
    out = shown.getvalue()
    assert out.startswith("before\n") and out.endswith("after\n")
    assert "│ a    │   1.0 │ x" in out and "|" not in out


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


def stats(name: str, rate: float, compression: float = 2.0, auto: str | None = None) -> Any:
    return SimpleNamespace(
        tokens_per_second=rate, simulated=False, auto=auto, step_compression=compression,
        strategy=SimpleNamespace(name=name), device_name="d", device="cpu", backend="cpu",
        backend_version="1", model="m", weights_hash="h", dtype="float32", batch_size=1,
        sampling=SimpleNamespace(guided=True), torch="2", rounding=None,
    )  # fmt: skip


def test_a_strategy_that_is_slower_than_plain_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    assert remark(stats("lantern", 74)) is None, "nothing is known yet"
    told = remark(stats("lantern", 74, 1.09))
    assert told is not None and told.startswith("1.09 tokens per step: hardly a draft")
    assert remark(stats("vanilla", 223)) is None
    assert remark(stats("vanilla", 200)) is None
    told = remark(stats("lantern", 74))
    assert told is not None and "74 tokens/s, and plain decoding drew 223 here before" in told
    assert remark(stats("eagle", 200)) is None, "within what processes vary by"
    assert remark(stats("chain", 900, auto="chains of up to 3 drafts")) is None
    told = remark(stats("eagle", 300))
    assert told is not None and "auto drew 900 here before" in told
