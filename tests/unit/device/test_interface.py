"""What a backend writes and what it leaves, next to what the tutorial says of each member."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from lantern_accel.device.backend import SEAM, Backend, Device, methods
from lantern_accel.device.plugins import backend_specs, open_backend
from lantern_accel.device.spec import BackendSpec
from lantern_accel.testing.certificate import NOT_OVERRIDDEN, RECOMMENDED, REQUIRED, members

ROOT = Path(__file__).parents[3]
TUTORIAL = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")


def rows() -> list[tuple[list[str], str, str, str]]:
    """Return the tutorial's rows: names, level, reference, example."""
    section = TUTORIAL[TUTORIAL.index("## Every method of the backend interface") :]
    found = re.findall(r"^\| (`.*?`) \| (\w+)[^|]* \| (.*?) \| (.*?) \|$", section, re.M)
    return [(re.findall(r"`([\w.]+)`", names), *rest) for names, *rest in found]


def test_the_tutorial_gives_each_member_the_level_and_the_cost_that_certificates_give() -> None:
    told = {name: (level, cost) for names, level, cost, _ in rows() for name in names}
    for name, cost in RECOMMENDED.items():
        assert told[name] == ("recommended", cost), name
    for name in REQUIRED:
        assert told[name][0] == "required", name
    plain = {
        name for name, (level, _) in told.items() if level == "recommended" and "." not in name
    }
    assert plain == set(RECOMMENDED)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][0])
def test_the_tutorial_s_examples_write_what_they_are_examples_of(
    row: tuple[list[str], str, str, str],
) -> None:
    names, _, _, example = row
    specs = backend_specs()
    backends = [word for word in re.split(r", ?", example.partition(":")[0]) if word in specs]
    assert backends or example.startswith(("every backend", "none overrides")), example
    written = {
        name: {
            *vars(importlib.import_module(f"lantern_accel_{name}.backend").DeviceBackend),
            *vars(type(spec)),
        }
        for name, spec in specs.items()
    }
    for backend in backends:
        folder = ROOT / "backends" / f"lantern_accel_{backend}"
        source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
        for name in (one.rpartition(".")[2] for one in names):
            inside = re.search(
                rf"(\w\.{name}\b[^=(\n]* = |def {name}\(|^    {name}\b.* = |\b{name}=)",
                source,
                re.M,
            )
            assert name in written[backend] or inside, f"{backend}: {name}"
    if example.startswith("none overrides"):
        for name in names:
            assert not [one for one, members in written.items() if name in members], name


def test_the_interface_has_at_most_fifty_methods() -> None:
    """A law: a method that comes takes the place of another."""
    found = methods()
    assert len(found) <= 50
    assert len(methods(Device)) <= 10
    required = {
        name for name in found if getattr(getattr(Backend, name), "__isabstractmethod__", 0)
    }
    assert required == {"facts", "synchronize"}
    # Nothing that a backend could write is left out of the count.
    mine = {name for name in dir(Backend) if not name.startswith("_")}
    assert {name for name in mine if callable(getattr(Backend, name))} == set(found)


def test_members_are_those_of_the_seam_and_know_who_wrote_them() -> None:
    with open_backend("null") as backend:
        found = {one.name: one for one in members(backend, backend_specs()["null"])}
    public = {name for kind in (BackendSpec, *SEAM) for name in vars(kind)}
    public = {name for name in public if not name.startswith("_")}
    assert public - set(REQUIRED) - set(NOT_OVERRIDDEN) <= set(found)
    assert (
        found["compute_dtypes"].written and found["prepare"].written and found["priority"].written
    )
    assert not found["capture"].written
    assert found["capture"].reference == RECOMMENDED["capture"]
    assert not {"facts", "probe"} & set(found)


def test_the_tutorial_lists_every_group_of_the_kit_and_every_static_check() -> None:
    from lantern_accel.testing import CHECKS

    listed = {
        name
        for line in re.findall(r"^\| (`.*?`) \|", TUTORIAL, re.M)
        for name in re.findall(r"`([\w.]+)`", line)
    }
    groups = {name.partition(".")[0] for name in CHECKS} - {"static"}
    assert groups | {name for name in CHECKS if name.startswith("static.")} <= listed
