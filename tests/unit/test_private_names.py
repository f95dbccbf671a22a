"""How many functions of the tests reach for a private name of ours: a count that may only fall.

A test that needs one shows a missing public way in. A name is ours where our code defines it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("lantern_accel", "profiles", "backends", "tools")
NAME = r"\b(_[a-z]\w*(?<!_))\b"
NAMES = re.compile(NAME)
#: Functions, and what is assigned to.
DEFINED = re.compile(rf"(?:def |(?=\b_\w+(?::[^=\n]+)? = )){NAME}")
#: Lower it with each test that comes to need none.
BOUND = 88


def texts(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def reached(function: ast.AST) -> Iterator[str]:
    """Go through others' attributes, names that are imported, and texts that may name either."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rsplit(".", 1)[-1]


def functions() -> list[str]:
    """Return the functions and classes of the tests that do, with the names."""
    ours = {name for _, text in texts(*OURS) for name in DEFINED.findall(text)}
    found = []
    for path, text in texts("tests"):
        if not ours.intersection(NAMES.findall(text)):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                names := ours.intersection(reached(node))
            ):
                found.append(f"{path}::{node.name}: {', '.join(sorted(names))}")
    return found


def test_fewer_and_fewer_tests_reach_for_private_names() -> None:
    found = functions()
    assert len(found) <= BOUND, f"{len(found)}, and {BOUND} is the most:\n" + "\n".join(found)
