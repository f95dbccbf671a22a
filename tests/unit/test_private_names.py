"""How many functions of the tests reach for a private name of ours: a count that may only fall.

A test that needs one shows a missing public way in. A name is ours where our code defines it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("lantern_accel", "backends", "tools")
PRIVATE = re.compile(r"_[a-z]\w*(?<!_)")
#: Lower it with each test that comes to need none.
BOUND = 100


def modules(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def private(names: Iterator[str]) -> set[str]:
    return {name for name in names if PRIVATE.fullmatch(name)}


def defined(module: ast.Module) -> Iterator[str]:
    """Go through what a module calls its functions, classes, variables and attributes."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


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


@cache
def functions() -> list[str]:
    ours = set[str]().union(*(private(defined(module)) for _, module in modules(*OURS)))
    return [
        f"{path.relative_to(ROOT)}::{node.name}: {', '.join(sorted(found))}"
        for path, module in modules("tests")
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (found := private(reached(node)) & ours)
    ]


def test_fewer_and_fewer_tests_reach_for_private_names() -> None:
    found = functions()
    assert len(found) <= BOUND, f"{len(found)}, and {BOUND} is the most:\n" + "\n".join(found)
