"""How much there is to read for whoever wants to understand a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.imports import closure, graph, lines

from lantern_accel.decoding.drafts import DraftSource

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
HERE = "lantern_accel.decoding"
#: What a step needs whatever drafts; with our sources; and all that the engine needs. Imports count
#: wherever they stand, and modules named by strings, so that a late import saves no line.
ROOTS = {
    "a step": [f"{HERE}.step"],
    "a step with every source": [f"{HERE}.step", f"{HERE}.sources"],
    "the engine": [f"{HERE}.engine"],
}
MOST = {"a step": 4322, "a step with every source": 6715, "the engine": 7552}
#: The most lines that the files have together which docs/architecture.md names to explain a step.
MOST_READ = 3133


@pytest.mark.parametrize("what", MOST)
def test_a_step_needs_few_lines(what: str) -> None:
    count = lines(closure(ROOTS[what]))
    assert count <= MOST[what], f"{what}: {count} lines, and {MOST[what]} are the most"


def section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"# {title}\n")[1].partition("\n#")[0]


def listed() -> list[str]:
    files = re.findall(r"^\d+\. `([a-z_/]+)\.py`", section("A step, file by file"), re.M)
    return ["lantern_accel." + name.replace("/", ".") for name in files]


def test_the_files_that_explain_a_step_are_few_and_in_reading_order() -> None:
    names = listed()
    assert {"strategy.rules", "decoding.step", "decoding.engine"} <= {n[14:] for n in names}
    assert lines(names) <= MOST_READ
    later = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if b in graph()[a]]
    assert not later, "needed before it is read"


def test_the_methods_of_a_source_are_listed() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Methods of a draft source"), re.M)
    known = {
        name
        for name in (*vars(DraftSource), *DraftSource.__annotations__)
        if not name.startswith("_")
    }
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(known)
