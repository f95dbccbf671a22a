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


def machine(tool: Any, **changes: Any) -> dict[str, Any]:
    """Return what publish.py writes: two runs in which auto is twice and four times as fast."""
    asked = {kind: [f"{kind} {n}" for n in range(2)] for kind in tool.KINDS}
    facts = {
        "name": "Some Processor",
        "cores": 2,
        "virtual": True,
        "notes": ["native kernels: x: y"],
    }
    lines = [
        {"part": part, "run": run, "strategy": name, "head": head, "batch": 1, "prompt": prompt,
         "seconds": [8.0 * run if name == "vanilla" else 4.0], "lost": [0.0],
         "tokens_per_step": [3.0]}
        for part in ("bundled", "sized")
        for run in (1, 2)
        for name, head in (("vanilla", True), ("auto", True), ("auto", False))
        for prompts in asked.values()
        for prompt in prompts
    ]  # fmt: skip
    for size in ("bundled", "B"):
        for program, seconds in (("official", 30.0), ("ours", 10.0)):
            lines.append({"part": f"beside-{size}", "run": 1, "model": size, "program": program})
            lines[-1]["seconds"] = [seconds]
    ms = {"1": 1.0, "16": 16.0, "2": 2.0}
    lines.append(
        {"part": "passes-b", "model": "b", "program": "llama.cpp", "weights": "f16", "ms": ms}
    )
    made = {
        "commit": "0123456789ab",
        "date": "2026-11-29",
        "kernels": tool.kernels(),
        "rows": lines,
    }
    return {**made, "prompts": asked, "environment": {"device": facts}, **changes}


def test_a_published_machine_fills_the_tables_and_the_chart(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    monkeypatch.setattr(tool, "PUBLISHED", folder)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "kernels", lambda: "now")
    monkeypatch.setattr(tool, "MACHINES", ())
    found = machine(tool)
    (folder / "some.json").write_text(json.dumps(found))
    (one,) = tool._machines()
    label = "Some (X), 2 virtual cores"
    cells = "12 s | 4 s | 3.00x"  # the median of 2x and 4x
    assert one.text == f"| {label} | 1 | {cells} | {cells} | 2026-11-29, 01234567 |"
    assert len(set(one.prompts)) == 2, "each kind of prompts is a set of its own"
    plain, auto, _ = tool._raced("bundled", ("composed",))
    assert "| 1.00x | 1.00x to 1.00x | 1.00x, 1.00x |" in plain.text
    assert "| 3.00x | 3.00x to 3.00x | 2.00x, 4.00x |" in auto.text
    assert [row.text.count("| 3.0x |") for row in tool._beside()] == [1, 0, 1, 0]
    assert "| llama.cpp, f16 | 1 ms | 2 ms | 16 ms |" in next(tool._passes()).text
    (folder / "some.json").write_text(json.dumps(machine(tool, kernels="others")))
    assert next(tool._machines()).text.endswith("older code |")
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
