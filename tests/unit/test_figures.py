"""Measured figures stand in tables that are made from data, and the written pages stay short."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tools import tool_module

ROOT = Path(__file__).resolve().parents[2]
#: The most lines of README and CHANGELOG, the most pages (README and docs/*.md), and their lines.
README_LINES, CHANGELOG_LINES, PAGES, PAGES_LINES = 100, 25, 18, 2600
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: A number with a unit of speed: a decimal one, or any speed-up or rate.
SPEED = re.compile(
    r"(?<![\w.,])(?:\d[\d,]*\.\d+ ?(?:x|tokens/s|images/s|ms|s|%)"
    r"|\d[\d,]*(?:x| tokens/s| images/s))(?!\w)"
)

AGE = re.compile(r"\| \d{4}-\d\d-\d\d, [0-9a-f]{8}(, older code)? \|$")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def tool() -> Any:
    return tool_module("figures")


@pytest.fixture(scope="module")
def listed() -> list[dict[str, Any]]:
    text = (ROOT / "docs" / "figures.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)["figures"]
    return found


def lines(page: Path) -> tuple[list[str], list[str]]:
    """Return a page's rows of tables, and its other lines, without code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    rows = [line for line in text.splitlines() if line.lstrip().startswith("|")]
    return rows, [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def test_figures_are_those_of_the_data_and_stand_in_their_pages(
    tool: Any, listed: list[dict[str, Any]]
) -> None:
    assert listed == tool.figures(), "run python tools/figures.py"
    for one in listed:
        assert (ROOT / one["data"]).is_file()
        for page in one["pages"]:
            text = (ROOT / page).read_text(encoding="utf-8")
            assert one["text"] in text, f"{page} lacks {one['name']}: {one['text']}"


def test_marked_tables_have_the_rows_of_the_data_and_no_others(tool: Any) -> None:
    for page in {made.page for made in tool.tables().values()}:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert tool.rewritten(page, text) == text, f"{page}: run python tools/figures.py"


def mixed(made: Any) -> bool:
    """Whether a column of a table holds figures of two sets of prompts."""
    columns = zip(*(row.prompts for row in made.rows), strict=True)
    return any(len({one for one in column if one}) > 1 for column in columns)


def ageless(made: Any) -> list[str]:
    """List rows that lack a day and commit in a column of that name."""
    aged = made.head.endswith("day, commit")
    return [row.text for row in made.rows if not (aged and AGE.search(row.text))]


def test_no_table_mixes_prompts_or_leaves_out_an_age(tool: Any) -> None:
    pages = {tool.README, tool.BENCHMARKS}
    for name_of, made in tool.tables().items():
        if made.page in pages:
            assert not mixed(made), name_of
            assert not ageless(made), name_of
    rows = [tool.Row(one, "a | 2026-11-29, 0123abcd", "", "", (one, "")) for one in "ab"]
    assert mixed(tool.Table("", "", tuple(rows))), "another set of prompts is seen"
    assert ageless(tool.Table("", "x | day, commit", (tool.Row("", "a | b", "", ""),)))
    assert ageless(tool.Table("", "x | y", tuple(rows[:1])))


def test_a_speed_up_is_that_of_one_run_and_prompt(tool: Any) -> None:
    rows = [
        {"part": "x", "run": run, "strategy": strategy, "head": True, "batch": 1, "prompt": prompt,
         "seconds": [8.0 * run if strategy == "vanilla" else 4.0], "lost": [0.0],
         "tokens_per_step": [3.0]}
        for run in (1, 2)
        for strategy in ("vanilla", "auto")
        for prompt in ("a", "b")
    ]  # fmt: skip
    found = {"rows": rows, "prompts": {"kind": ["a"]}}
    plain, auto = (
        tool.compare_in_run(found, "x", (n, True, 1), ["kind"]) for n in ("vanilla", "auto")
    )
    assert plain.cells == "12 s | 1.00x | 1.00x to 1.00x | 1.00x, 1.00x | 3.00"
    assert auto.cells == "4 s | 3.00x | 3.00x to 3.00x | 2.00x, 4.00x | 3.00"


def test_a_published_machine_has_a_chart_and_says_that_kernels_have_changed(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, found), *_ = tool.read_published()
    for kernels, older in ((found["kernels"], False), ("others", True)):
        monkeypatch.setattr(tool, "kernels", lambda kernels=kernels: kernels)
        assert next(tool._machines()).text.endswith("older code |") == older
    tool.draw(found, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 5000
    assert "speed.png" in tool.chart()


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_every_speed_in_a_table_is_made_from_data(page: Path, listed: list[dict[str, Any]]) -> None:
    known = {
        number
        for one in listed
        if name(page) in one["pages"]
        for number in SPEED.findall(re.sub(r"`[^`]*`", "", one["text"]))
    }
    rows, _ = lines(page)
    for row in rows:
        if "https://arxiv.org/" in row or "github.com/" in row:
            continue  # a figure of others, with its source
        unknown = set(SPEED.findall(row)) - known
        assert not unknown, f"{name(page)}: tools/figures.py does not make {unknown} of {row}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_no_prose_states_a_measured_speed(page: Path) -> None:
    _, prose = lines(page)
    assert not {line: found for line in prose if (found := SPEED.findall(line))}


def test_a_speed_is_recognised() -> None:
    text = "1.49x, 3.4 ms, 1,234.5 tokens/s, 2 images/s, 12 tokens/s, 3x and 0.5 % count"
    assert len(SPEED.findall(text)) == 7
    assert not SPEED.findall("64x64 pixels, torch 2.13, 10 s, 5 %, 1024x576, release 1.19, 0.0081")


def test_the_written_pages_are_short() -> None:
    counts = {name(page): len(page.read_text(encoding="utf-8").splitlines()) for page in WRITTEN}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert counts["README.md"] <= README_LINES
    assert len(changelog.splitlines()) <= CHANGELOG_LINES
    assert len(counts) <= PAGES, sorted(counts)
    assert sum(counts.values()) <= PAGES_LINES, counts
