"""Who may import whom: our packages, read off every import, wherever it stands."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Our packages and their folders; parts of the second are named ``profiles.measure`` and so on below.
FOLDERS = {
    "lantern_accel": ROOT / "lantern_accel",
    "lantern_accel_profiles": ROOT / "profiles" / "lantern_accel_profiles",
}
#: Imported by everybody.
GROUND = {
    "bounds",
    "errors",
    "extensions",
    "files",
    "progress",
    "prompts",
    "records",
    "store",
    "_version",
}
#: The layers from the lowest up: a package imports from those below its own, and from itself.
LAYERS = (
    ("device",),
    ("strategy", "nn", "checkpoints"),
    ("decoding",),
    ("families",),
    ("models",),
    ("memory",),
    ("generation",),
    ("api", "testing"),
    ("training", "serving"),
    ("porting", "integrations"),
    ("cli",),
    ("profiles.quality", "profiles.plot_style", "profiles.store"),
    ("profiles.measure", "profiles.evaluation"),
    ("profiles.tuning", "profiles.report", "profiles.load"),
    ("profiles.commands",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}


def package(module: str) -> str:
    """Return the package of a module's dotted path, as :data:`LAYERS` names it."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return f"profiles.{name}" if top == "lantern_accel_profiles" else name


@cache
def imports(source: str) -> list[str]:
    """Return the modules of ours that a file imports, in functions and for types too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        found += [name for name in names if name.partition(".")[0] in FOLDERS and "." in name]
    return found


def crossed(path: str, source: str) -> set[tuple[str, str]]:
    """Return the (importer, imported) pairs of packages that do not lead down."""
    here = package(path.removesuffix(".py").replace("/", "."))
    if here.removeprefix("profiles.") in ("__init__", "__main__"):
        return set()
    pairs = {(here, package(name)) for name in imports(source)}
    layer = -1 if here in GROUND else LAYER_OF[here]
    return {
        (a, b)
        for a, b in pairs
        if a != b and b not in GROUND and (b not in LAYER_OF or LAYER_OF[b] >= layer)
    }


def sources() -> dict[str, Path]:
    """Return our files by their paths, which begin with the name of a package."""
    return {
        f"{top}/{path.relative_to(folder).as_posix()}": path
        for top, folder in FOLDERS.items()
        for path in sorted(folder.rglob("*.py"))
    }


def found() -> dict[tuple[str, str], list[str]]:
    out: dict[tuple[str, str], list[str]] = {}
    for name, path in sources().items():
        for pair in crossed(name, path.read_text(encoding="utf-8")):
            out.setdefault(pair, []).append(name)
    return out


def test_no_package_imports_what_it_may_not() -> None:
    wrong = found()
    assert not wrong, "\n".join(f"{a} -> {b}: {', '.join(f)}" for (a, b), f in wrong.items())


def test_every_package_has_a_layer() -> None:
    packages = {package(name.replace("/", ".")) for name in sources() if name.count("/") > 1}
    assert packages <= set(LAYER_OF), "a package without a layer"


def test_no_two_files_import_each_other() -> None:
    """Imports within functions and for types count: whoever reads one file must not need the other."""
    files = {
        name[:-3].replace("/", "."): path
        for name, path in sources().items()
        if path.name != "__init__.py"
    }
    below = {
        name: {
            one
            for found in imports(path.read_text(encoding="utf-8"))
            for one in (found, found.rpartition(".")[0])
            if one in files and one != name
        }
        for name, path in files.items()
    }
    TopologicalSorter(below).prepare()  # names a circle where there is one


@pytest.mark.parametrize(
    ("path", "source", "pair"),
    [
        ("decoding/engine.py", "from lantern_accel.families.base import Model", "families"),
        ("decoding/x.py", "def f():\n    import lantern_accel.families.registry", "families"),
        ("decoding/x.py", "if TYPE_CHECKING:\n    from lantern_accel import families", "families"),
        ("generation/pipeline.py", "from lantern_accel.testing import kit", "testing"),
        (
            "training/loop.py",
            "from lantern_accel_profiles.evaluation import run",
            "profiles.evaluation",
        ),
        ("cli/app.py", "from lantern_accel_profiles.measure import run", "profiles.measure"),
        ("memory/plan.py", "from lantern_accel.cli.options import OPTION", "cli"),
        ("nn/vq.py", "from lantern_accel.decoding.rows import Allowed", "decoding"),
        ("device/spec.py", "from lantern_accel.families.spec import FamilySpec", "families"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, pair: str) -> None:
    here = path.partition("/")[0]
    assert {(here, pair)} <= crossed(f"lantern_accel/{path}", source)
    assert not crossed(
        f"lantern_accel/{path}",
        f"from lantern_accel.{here}.x import y\nfrom lantern_accel import errors",
    )
