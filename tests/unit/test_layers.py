"""Who may import whom: our packages, by import statements anywhere and by modules in strings."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest
from support.imports import graph, modules, planted

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
    ("api", "testing", "__init__"),
    ("training", "serving"),
    ("porting", "integrations"),
    ("cli",),
    ("profiles.quality", "profiles.plot_style", "profiles.store"),
    ("profiles.measure", "profiles.evaluation"),
    ("profiles.tuning", "profiles.report", "profiles.load"),
    ("profiles.commands",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}


#: Files that stand above all layers: what a user imports first.
ABOVE = {"__init__", "profiles.__init__"}


def package(module: str) -> str:
    """Return the package of a module's dotted path, named as in :data:`LAYERS`; a backend is one."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0] or "__init__"
    if top not in ("lantern_accel", "lantern_accel_profiles"):
        return top
    return f"profiles.{name}" if top == "lantern_accel_profiles" else name


def crossed(module: str, imported: frozenset[str]) -> set[tuple[str, str]]:
    """Return the (importer, imported) pairs of packages that do not lead down."""
    here = package(module)
    if here in ABOVE:
        return set()
    layer = -1 if here in GROUND else LAYER_OF.get(here, len(LAYERS))
    pairs = {(here, package(name)) for name in imported} - {(here, here)}
    return {(a, b) for a, b in pairs if b not in GROUND and LAYER_OF.get(b, len(LAYERS)) >= layer}


def test_no_package_imports_what_it_may_not() -> None:
    wrong: dict[tuple[str, str], list[str]] = {}
    for name, imported in graph().items():
        for pair in crossed(name, imported):
            wrong.setdefault(pair, []).append(name)
    assert not wrong, "\n".join(f"{a} -> {b}: {', '.join(f)}" for (a, b), f in wrong.items())


def test_every_package_has_a_layer() -> None:
    ours = {name for name in modules() if name.startswith(("lantern_accel.", "lantern_accel_p"))}
    packages = {package(name) for name in ours if name.count(".") > 1}
    assert packages <= set(LAYER_OF), "a package without a layer"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions, for types and by strings count, in packages and backends."""
    TopologicalSorter(graph()).prepare()  # names a circle where there is one


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        # A circle by a string alone, as there was one.
        ("strategy.sources", "import_module('lantern_accel.strategy.values')"),
        ("decoding.drafts", "import_module(f'{__package__}.sources.{kind}')"),
        ("decoding.step", "def f():\n    from .engine import Engine"),
        ("device.plan", "if TYPE_CHECKING:\n    from . import Backend"),
        ("device.plan", "PROGRAM = 'from lantern_accel.device.backend import Backend; Backend()'"),
    ],
)
def test_a_planted_circle_is_caught(module: str, lines: str) -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(planted(**{f"lantern_accel.{module}": lines})).prepare()


@pytest.mark.parametrize(
    ("module", "lines", "up"),
    [
        ("decoding.engine", "from lantern_accel.families.base import Model", "families"),
        ("decoding.step", "def f():\n    from ..families import registry", "families"),
        ("decoding.step", "if TYPE_CHECKING:\n    from lantern_accel import families", "families"),
        ("memory.plan", "def __getattr__(name):\n    return import_module(HOMES[name])\n"
         "HOMES = {'x': 'lantern_accel.cli.options'}", "cli"),
        ("cli.app", "from lantern_accel_profiles.measure import run", "profiles.measure"),
        ("cli.app", "import_module('lantern_accel_cpu.backend')", "lantern_accel_cpu"),
        ("device.spec", "from lantern_accel import load", "__init__"),
    ],
)  # fmt: skip
def test_a_planted_arrow_up_is_caught(module: str, lines: str, up: str) -> None:
    name, here = f"lantern_accel.{module}", module.partition(".")[0]
    assert crossed(name, planted(**{name: lines})[name]) == {(here, up)}
    within = f"from lantern_accel.{here} import y\nfrom lantern_accel import errors"
    assert not crossed(name, planted(**{name: within})[name])
