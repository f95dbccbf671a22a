"""The table of every member of the backend interface, made from docstrings and from the backends here.

Nothing is imported. Levels and the cost of the reference come from ``testing/certificate.py``, sentences
from docstrings, and the last column names the backends of this repository that write the member.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROLE = re.compile(r":(?:class|meth|func|data|mod|attr):`~?\.*([^`]+)`")
#: Classes whose members a backend may write: the file below ``lantern_accel/device``, and the heading.
PARTS = {
    "BackendSpec": ("spec", "The specification"),
    "Device": ("backend", "The device"),
    "Meters": ("backend", "What it measures"),
    "Preferences": ("preferences", "Preferences"),
    "Capture": ("capture", "How a step runs"),
    "Training": ("backend", "Training"),
    "Ops": ("operations", "The operations of a model"),
    "SamplingOps": ("sampling", "Guidance, filters and draws"),
    "Replay": ("capture", "What `capture` returns"),
    "HostCopy": ("capture", "What `host_copy` returns"),
}
#: Parts whose members are written in a class of their own, or as an argument, and not in the backend's.
APART = ("Preferences", "Replay", "HostCopy")


@dataclass(frozen=True)
class Member:
    """A member of the interface: the class that declares it, its level, and what is said of it."""

    part: str
    name: str
    level: str
    says: str
    reference: str
    backends: tuple[str, ...]


def members() -> list[Member]:
    """Return every public member, in the order of the source."""
    recommended, required = (_constant(name) for name in ("RECOMMENDED", "REQUIRED"))
    written = {path.name.removeprefix("lantern_accel_"): _written(path) for path in _folders()}
    found, known = list[Member](), set[str]()
    for part, (file, _) in PARTS.items():
        tree = ast.parse((ROOT / "lantern_accel" / "device" / f"{file}.py").read_text("utf-8"))
        (node,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == part)
        for name, says in _declared(node):
            own = part not in APART
            if own and (name in known or name.startswith("_")):
                continue  # protocols repeat what they share
            known |= {name} if part != "BackendSpec" else set()
            level = "required" if own and name in required else "optional"
            level = "recommended" if own and name in recommended else level
            by = tuple(backend for backend, names in written.items() if name in names[part])
            cost = recommended.get(name, "") if own else ""
            found.append(Member(part, name, level, says, cost, by))
    return found


def lines() -> list[str]:
    """Return the section of the reference: a table for each part."""
    made = [
        "",
        "## Every member of the interface",
        "",
        "*Required* members have no reference. *Recommended* ones have a reference that is slow on most "
        "accelerators or hides something. *Optional* ones are for devices that do better.",
    ]
    every = members()
    for part, (_, heading) in PARTS.items():
        head = "| member | level | what it is | left to the reference | written by |"
        made += ["", f"### {heading}: `{part}` at a glance", "", head, "|---|---|---|---|---|"]
        for one in every:
            if one.part == part:
                cells = (one.says, one.reference, ", ".join(one.backends))
                rest = " | ".join(cell.replace("|", "\\|") for cell in cells)
                made.append(f"| `{one.name}` | {one.level} | {rest} |")
    return made


def _declared(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the public members of a class with the first sentence of what is said of each."""
    for at, one in enumerate(node.body):
        if isinstance(one, ast.FunctionDef):
            if not one.name.startswith("_") or one.name == "__call__":
                yield one.name, _sentence(ast.get_docstring(one) or "")
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            after = node.body[at + 1] if at + 1 < len(node.body) else None
            said = after.value if isinstance(after, ast.Expr) else None
            text = said.value if isinstance(said, ast.Constant) else ""
            if not one.target.id.startswith("_"):
                yield one.target.id, _sentence(str(text))


def plain(text: str) -> str:
    """Return a docstring's text with double backticks and roles as code."""
    text = ROLE.sub(lambda match: f"`{match.group(1).rsplit('.', 1)[-1]}`", text)
    return text.replace("``", "`")


def _sentence(text: str) -> str:
    return plain(" ".join(text.partition("\n\n")[0].split())).replace("<", "&lt;")


def _constant(name: str) -> Any:
    tree = ast.parse((ROOT / "lantern_accel/testing/certificate.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def _folders() -> list[Path]:
    return sorted(path for path in (ROOT / "backends").glob("lantern_accel_*") if path.is_dir())


def _written(folder: Path) -> dict[str, set[str]]:
    """Return the members that a backend's folder writes, by part of the interface."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    classes = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
    by_name = {one.name: one for one in classes}

    def of(base: str) -> set[str]:
        own = [one for one in classes if base in map(ast.unparse, one.bases)]
        return {name for one in own for name in _names(by_name, one.name)}

    seam = _names(by_name, "DeviceBackend") | of("DeviceBackend")
    found = dict.fromkeys(PARTS, seam)
    found |= {part: of(part) for part in ("BackendSpec", "Replay", "HostCopy")}
    calls = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func).endswith(("Preferences", "replace"))]
    found["Preferences"] = {word.arg for one in made for word in one.keywords if word.arg}
    return found


def _names(by_name: dict[str, ast.ClassDef], name: str) -> set[str]:
    """Return what a class and its bases in the same folder define, also on ``self`` when it is made."""
    node = by_name.get(name)
    if node is None:
        return set()
    found = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    for one in ast.walk(node):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else (target,):
                on_self = isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
                if isinstance(part, ast.Attribute) and on_self:
                    found.add(part.attr)
                elif isinstance(part, ast.Name) and one in node.body:
                    found.add(part.id)
    return found.union(*(_names(by_name, ast.unparse(base)) for base in node.bases))
