"""The table of every member of the backend interface, made from docstrings and from the backends here.

Nothing is imported. Levels and the cost of the reference come from ``testing/certificate.py``, sentences
from docstrings, and the last column names the backends of this repository that write the member.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROLE = re.compile(r":(?:class|meth|func|data|mod|attr):`~?\.*([^`]+)`")
#: Classes whose members a backend may write, and the file below ``lantern_accel/device``.
PARTS = {
    "BackendSpec": "spec", "Device": "backend", "Meters": "backend", "Preferences": "preferences",
    "Capture": "capture", "Training": "backend", "Ops": "operations", "SamplingOps": "sampling",
    "Replay": "capture", "HostCopy": "capture",
}  # fmt: skip
#: Parts whose members are written in a class of their own, or as an argument, and not in the backend's.
APART = ("Preferences", "Replay", "HostCopy")
HEAD = "| member | level | what it is | left to the reference | written by |"


class Member(NamedTuple):
    """A member of the interface: the class that declares it, its level, and what is said of it."""

    part: str
    name: str
    level: str
    says: str
    reference: str
    backends: tuple[str, ...]


def members() -> list[Member]:
    """Return every public member, in the order of the source."""
    levels = _tree(ROOT / "lantern_accel/testing/certificate.py").body
    made: dict[str, Any] = {
        ast.unparse(one.targets[0]): one.value for one in levels if isinstance(one, ast.Assign)
    }
    recommended, required = (ast.literal_eval(made[name]) for name in ("RECOMMENDED", "REQUIRED"))
    folders = sorted(path for path in (ROOT / "backends").glob("lantern_accel_*") if path.is_dir())
    written = {path.name.removeprefix("lantern_accel_"): _list_written(path) for path in folders}
    found, known = list[Member](), set[str]()
    for part, file in PARTS.items():
        tree = _tree(ROOT / "lantern_accel" / "device" / f"{file}.py")
        (node,) = (one for one in _classes(tree) if one.name == part)
        for name, says in _list_declared(node):
            own = part not in APART
            if own and (name in known or name == "__call__"):
                continue  # protocols repeat what they share
            known |= {name} if part != "BackendSpec" else set()
            level = "recommended" if own and name in recommended else "optional"
            level = "required" if own and name in required else level
            by = tuple(backend for backend, names in written.items() if name in names[part])
            cost = recommended.get(name, "") if own else ""
            found.append(Member(part, name, level, says, cost, by))
    return found


def lines() -> list[str]:
    """Return the section of the reference: a table for each part."""
    made = ["", "## Every member of the interface", ""]
    made += [
        "*Required* members have no reference. *Recommended* ones have a reference that is slow on most "
        "accelerators or hides something. *Optional* ones are for devices that do better.",
    ]
    every = members()
    for part in PARTS:
        made += ["", f"### `{part}` at a glance", "", HEAD, "|---|---|---|---|---|"]
        for one in (one for one in every if one.part == part):
            cells = (one.says, one.reference, ", ".join(one.backends))
            rest = " | ".join(cell.replace("|", "\\|") for cell in cells)
            made.append(f"| `{one.name}` | {one.level} | {rest} |")
    return made


def plain(text: str) -> str:
    """Return a docstring's text with double backticks and roles as code."""
    text = ROLE.sub(lambda match: f"`{match.group(1).rsplit('.', 1)[-1]}`", text)
    return text.replace("``", "`")


def _list_declared(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the public members of a class with the first sentence of what is said of each."""
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        name, text = "_", ""
        if isinstance(one, ast.FunctionDef):
            name, text = one.name, ast.get_docstring(one) or ""
        elif isinstance(one, ast.AnnAssign):
            name = ast.unparse(one.target)
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
        if not name.startswith("_") or name == "__call__":
            yield name, plain(" ".join(text.partition("\n\n")[0].split())).replace("<", "&lt;")


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]


def _list_written(folder: Path) -> dict[str, set[str]]:
    """Return the members that a backend's folder writes, by part of the interface."""
    trees = [_tree(path) for path in folder.rglob("*.py")]
    classes = {one.name: one for tree in trees for one in _classes(tree)}

    def names(node: ast.ClassDef) -> set[str]:
        """Return what a class and its bases here define, and what they set on ``self``."""
        source = ast.unparse(node)
        found = set(re.findall(r"^    (?:def )?(\w+)(?=\(|: | = |, )", source, re.M))
        found |= set(re.findall(r"\bself\.(\w+)(?:: .*)? = ", source))
        found |= {
            word
            for one in re.findall(r"^    (\w+(?:, \w+)+) = ", source, re.M)
            for word in one.split(", ")
        }
        return found.union(
            *(names(classes[base]) for base in map(ast.unparse, node.bases) if base in classes)
        )

    def of(base: str) -> set[str]:
        return set[str]().union(
            *(names(one) for one in classes.values() if base in map(ast.unparse, one.bases))
        )

    seam = names(classes["DeviceBackend"]) | of("DeviceBackend")
    found = {
        part: of(part) if part in ("BackendSpec", "Replay", "HostCopy") else seam for part in PARTS
    }
    calls = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func).endswith(("Preferences", "replace"))]
    return found | {"Preferences": {word.arg for one in made for word in one.keywords if word.arg}}
