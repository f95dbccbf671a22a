"""Who may import whom: the rooms of ``lantern_accel``, read off every import, wherever it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "lantern_accel"
#: Imported by everybody.
GROUND = {"bounds", "cached", "errors", "files", "_version"}
#: What reads files only, and what opens whole models: two storeys of one room.
LOW = {"checkpoints.weights", "checkpoints.loading", "checkpoints.layouts"}
#: Each room with those that it may import, the ground excepted.
DEVICE = {"device"}
STRATEGY = {*DEVICE, "strategy", "decoding"}  # presets and values share trees with decoding
DECODING = {*DEVICE, "strategy", "nn", "decoding"}
FAMILIES = {*DECODING, "families", "checkpoints.low"}
CHECKPOINTS = {*FAMILIES, "checkpoints"}
MEMORY = {*CHECKPOINTS, "memory"}
GENERATION = {*MEMORY, "generation", "api"}
QUALITY = {*GENERATION, "quality"}
TESTING = {*FAMILIES, "testing"}
MAY = {
    "device": DEVICE,
    "strategy": STRATEGY,
    "nn": {*DEVICE, "nn"},
    "decoding": DECODING,
    "checkpoints.low": {"checkpoints.low"},
    "families": FAMILIES,
    "checkpoints": CHECKPOINTS,
    "memory": MEMORY,
    "generation": GENERATION,
    "api": GENERATION,
    "quality": QUALITY,
    "testing": TESTING,
    "porting": {*TESTING, "api", "porting"},  # its template has tests of its own
    "measure": {*QUALITY, "measure", "report"},
    "report": {*QUALITY, "measure", "report"},
    "serving": {*GENERATION, "serving"},
    "tuning": {*QUALITY, "measure", "tuning"},
    "distributed": {*GENERATION, "measure", "report", "tuning", "distributed"},
    "training": {*QUALITY, "training"},
    "evaluation": {*QUALITY, "evaluation"},
}


def room(module: str) -> str:
    """Return the room of a module's dotted path below the package; "" for the package itself."""
    parts = module.split(".")
    if ".".join(parts[:2]) in LOW:
        return "checkpoints.low"
    return parts[0]


def imports(source: str) -> Iterator[str]:
    """Go through the modules of ours that a file imports, in functions and for types too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        for name in names:
            if name.startswith("lantern_accel."):
                yield name.removeprefix("lantern_accel.")


def crossed(path: str, source: str) -> set[tuple[str, str]]:
    """Return the (importer, imported) pairs of rooms that the contract does not allow."""
    here = room(path.removesuffix(".py").replace("/", "."))
    if here in ("cli", "__init__", "__main__"):
        return set()
    pairs = {(here, room(name)) for name in imports(source)}
    allowed = {*GROUND, *MAY.get(here, set())}
    return {(a, b) for a, b in pairs if b not in allowed and a not in GROUND and a != b}


def found() -> dict[tuple[str, str], list[str]]:
    out: dict[tuple[str, str], list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for pair in crossed(name, path.read_text(encoding="utf-8")):
            out.setdefault(pair, []).append(name)
    return out


def test_no_room_imports_what_it_may_not() -> None:
    wrong = found()
    assert not wrong, "\n".join(f"{a} -> {b}: {', '.join(f)}" for (a, b), f in wrong.items())


@pytest.mark.parametrize(
    ("path", "source", "pair"),
    [
        ("decoding/engine.py", "from lantern_accel.families.base import Model", "families"),
        ("decoding/x.py", "def f():\n    import lantern_accel.families.registry", "families"),
        ("decoding/x.py", "if TYPE_CHECKING:\n    from lantern_accel import families", "families"),
        ("generation/pipeline.py", "from lantern_accel.testing import kit", "testing"),
        ("evaluation/run.py", "from lantern_accel.training.loop import run", "training"),
        ("training/loop.py", "from lantern_accel.evaluation import run", "evaluation"),
        ("measure/run.py", "from lantern_accel.training import loop", "training"),
        ("memory/plan.py", "from lantern_accel.cli.options import OPTION", "cli"),
        ("nn/vq.py", "from lantern_accel.decoding.rows import Allowed", "decoding"),
        ("device/spec.py", "from lantern_accel.families.spec import FamilySpec", "families"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, pair: str) -> None:
    assert {(path.partition("/")[0], pair)} <= crossed(path, source)
    here = path.partition("/")[0]
    assert not crossed(
        path, f"from lantern_accel.{here}.x import y\nfrom lantern_accel import errors"
    )
