"""Reads which modules a file imports: statements anywhere, and modules that strings name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Our packages and their folders.
FOLDERS = {
    "lantern_accel": ROOT / "lantern_accel",
    "lantern_accel_profiles": ROOT / "profiles" / "lantern_accel_profiles",
} | {one.parent.name: one.parent for one in sorted(ROOT.glob("backends/*/__init__.py"))}
#: Functions that import a module by its name.
BY_NAME = {"import_module", "__import__", "run_module", "resolve_name"}


@cache
def modules() -> Mapping[str, Path]:
    """Return every file of our packages, by the dotted name that imports it."""
    found = {}
    for top, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (top, *path.relative_to(folder).with_suffix("").parts)
            if "template" not in parts:  # the scaffold of a backend to be written
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def _prefix(node: ast.expr, package: str) -> str:
    """Return how a module's name begins that an expression makes; empty where nothing is known of it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return package if node.id in ("__package__", "__name__") else ""
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.FormattedValue) else one for one in node.values]
    text = ""
    for part in parts:
        begun = _prefix(part, package)
        text += begun
        if not begun or (isinstance(part, ast.BinOp | ast.JoinedStr) and begun.endswith(".")):
            break
    return text


@cache
def imports(module: str, source: str, is_package: bool = False) -> frozenset[str]:
    """Return the modules of ours that a file imports, by their dotted names.

    Imports count in functions, in ``if TYPE_CHECKING`` and relative to the file's package. A string
    counts that is the whole name of a module, with ``:NAME`` behind it too, or a program that imports
    one; docstrings and names of loggers do not. In a file that imports by name every word of a string
    counts too, behind the file's package and behind what the call's text begins with; where no word is
    a module there, every module that begins so counts.
    """
    known = modules()
    package = module if is_package else module.rpartition(".")[0]
    names: set[str] = set()
    called: set[str] = set()
    texts: dict[int, str] = {}
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                texts[id(node)] = node.value
        elif isinstance(node, ast.Expr):
            prose.add(id(node.value))
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            names |= {f"{base}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Call) and node.args:
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function == "getLogger":
                prose.update(map(id, node.args))
            elif function in BY_NAME:
                text = _prefix(node.args[0], package)
                called.add(package + text if text.startswith(".") else text)
    strings = [text for key, text in texts.items() if key not in prose]
    for text in strings:
        if text.startswith(("from ", "import ")):
            names |= set(re.findall(r"(?:from|import) ([\w.]+)", text))
    words = {word.partition(":")[0] for text in strings for word in text.split()}
    names |= {word for word in (*words, *called) if "." in word and word in known}
    ends = {one for one in called if one.endswith(".")}
    for start in (*ends, package + ".") if called else ():
        hits = {start + word for word in words if start + word in known}
        if start in ends and not hits:
            hits = {one for one in known if one.startswith(start)}
        names |= hits
    found = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name and name != module:
            found.add(name)
    return frozenset(found)


@cache
def graph() -> Mapping[str, frozenset[str]]:
    """Return what every module of ours imports."""
    return {
        name: imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")
        for name, path in modules().items()
    }


def closure(roots: Iterable[str], below: Mapping[str, frozenset[str]] | None = None) -> set[str]:
    """Return the modules that ``roots`` need, themselves included; ``below``: what each imports."""
    below = graph() if below is None else below
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += below[name]
    return found


def planted(**added: str) -> dict[str, frozenset[str]]:
    """Return what every module imports, with lines ``added`` at the end of some of them."""
    found = dict(graph())
    for name, more in added.items():
        path = modules()[name]
        source = f"{path.read_text(encoding='utf-8')}\n\n{more}\n"
        found[name] = imports(name, source, path.name == "__init__.py")
    return found


def lines(names: Iterable[str]) -> int:
    """Return how many lines the files of some modules have together."""
    return sum(len(modules()[one].read_text(encoding="utf-8").splitlines()) for one in names)
