"""Measured figures stand in tables that are made from data, and the written pages stay short."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The most lines of README and CHANGELOG, the most pages (README and docs/*.md), and their lines.
README_LINES, CHANGELOG_LINES, PAGES, PAGES_LINES = 100, 25, 18, 2600
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: A number with a unit of speed: a decimal one, or any speed-up or rate.
SPEED = re.compile(
    r"(?<![\w.,])(?:\d[\d,]*\.\d+ ?(?:x|tokens/s|images/s|ms|s|%)"
    r"|\d[\d,]*(?:x| tokens/s| images/s))(?!\w)"
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def tool() -> Any:
    import sys

    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


def test_no_machine_and_model_has_two_figures(tool: Any) -> None:
    for machine, rows in tool.RACES.items():
        batches = [
            next(iter(json.loads((ROOT / f"profiles/auto/{file}.json").read_bytes())["batches"]))
            for file, *_ in rows
        ]
        keys = [
            (model, dtype, batch) for (_, model, dtype, _), batch in zip(rows, batches, strict=True)
        ]
        assert len(set(keys)) == len(keys), machine


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
