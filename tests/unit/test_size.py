"""How much there is, as bounds that may only fall: lines, loose types, and questions of a source's type.

After a change that lowers a count, lower its bound here. One that would raise it has to remove something
first, or to say in its commit why the bound is worth raising.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lantern_accel"
#: What measures and reports, a package of its own.
PROFILES = ROOT / "profiles" / "lantern_accel_profiles"
#: Folders of the wheel, together: a line that moves from one to another is not saved.
WHEEL = [PACKAGE, PROFILES, ROOT / "backends"]
#: Classes of :mod:`lantern_accel.strategy` that say where drafts come from.
SOURCES = {"NoTree", "ChainTree", "StaticTree", "DynamicTree", "Window", "SelfDrafts"}
SOURCES |= {"AdaptiveSource", "DraftConfig"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted([*PACKAGE.rglob("*.py"), *PROFILES.rglob("*.py")]):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def lines(folder: Path) -> int:
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in folder.rglob("*.py"))


def annotations(module: ast.Module) -> Iterator[ast.expr | None]:
    """Go through the annotations of variables, all arguments and returns."""
    for node in ast.walk(module):
        if isinstance(node, ast.AnnAssign | ast.arg):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.returns


def loose() -> int:
    """Count ``Any`` anywhere in annotations, and everywhere else where an alias could hide it."""
    notes = [n for _, tree in trees() for n in annotations(tree) if isinstance(n, ast.Constant)]
    assert not any("Any" in str(note.value) for note in notes), "an annotation is a string"
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for _, tree in trees()
        for node in ast.walk(tree)
    )


def names(node: ast.expr) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name))


def questions() -> int:
    """Count the calls of isinstance outside ``strategy/`` that ask which source of drafts it is."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and bool(SOURCES.intersection(names(node.args[1])))
        for path, tree in trees()
        if PACKAGE / "strategy" not in path.parents
        for node in ast.walk(tree)
    )


def read_by_name() -> int:
    """Count the reads of attributes by name in the package: getattr, attrgetter, methodcaller."""
    return sum(
        isinstance(node, ast.Name | ast.Attribute)
        and (node.id if isinstance(node, ast.Name) else node.attr)
        in {"getattr", "attrgetter", "methodcaller"}
        for path, tree in trees()
        if PACKAGE in path.parents
        for node in ast.walk(tree)
    )


def doubled() -> int:
    """Count the classes beyond the first of each public name; ``_Name`` counts as ``Name``."""
    where: dict[str, list[str]] = defaultdict(list)
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].append(node.name)
    return sum(len(kept) - 1 for name, kept in where.items() if name in kept)


BOUNDS = {
    "lines of all that the wheel holds": (lambda: sum(map(lines, WHEEL)), 65951),
    "lines of tests": (lambda: lines(ROOT / "tests"), 50489),
    "lines of decoding with its sources": (lambda: lines(PACKAGE / "decoding"), 3949),
    "Any, in annotations and aliases": (loose, 183),
    "attributes that are read by name": (read_by_name, 60),
    "public classes of a name that another class has": (doubled, 1),
    "isinstance of a source of drafts outside strategy": (questions, 8),
}


@pytest.mark.parametrize("what", BOUNDS)
def test_a_count_never_rises(what: str) -> None:
    count, bound = BOUNDS[what]
    assert count() <= bound, f"{what}: {count()}, and {bound} is the most"
