"""What a backend writes and what it leaves, next to what the reference says of each member."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import interface_table

from lantern_accel import device
from lantern_accel.device.backend import SEAM, Backend, Device, methods
from lantern_accel.device.capture import HostCopy, Replay
from lantern_accel.device.plugins import backend_specs, open_backend
from lantern_accel.device.preferences import Preferences
from lantern_accel.device.spec import BackendSpec
from lantern_accel.testing.certificate import NOT_OVERRIDDEN, RECOMMENDED, REQUIRED, members

ROOT = Path(__file__).parents[3]
TUTORIAL = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")


EVERY = interface_table.members()
"""The rows of the table in the reference, which the site makes."""


def public(of: type) -> set[str]:
    known = {*vars(of), *vars(of).get("__annotations__", {})}
    return {name for name in known if not name.startswith("_")}


def test_the_reference_s_table_has_every_member() -> None:
    listed = {(one.part, one.name) for one in EVERY}
    shared = {name for kind in SEAM for name in public(kind)} - {n for _, n in listed}
    assert not shared, "the table lacks these"
    for kind in (BackendSpec, Preferences, Replay, HostCopy):
        assert public(kind) <= {name for part, name in listed if part == kind.__name__}
    assert ("Replay", "__call__") in listed
    text = "\n".join(interface_table.lines())
    for one in EVERY:
        assert f"| `{one.name}` | {one.level} |" in text, one.name


def test_the_table_gives_each_member_the_level_and_the_cost_that_certificates_give() -> None:
    own = [one for one in EVERY if one.part not in interface_table.APART]
    recommended = {one.name: one.reference for one in own if one.level == "recommended"}
    assert recommended == RECOMMENDED
    assert {one.name for one in own if one.level == "required"} == set(REQUIRED)
    for one in own:
        described = one.says or one.name in (*REQUIRED, "preferences")
        assert described, f"{one.name} has no docstring"


def test_the_table_names_the_backends_that_write_a_method() -> None:
    by_name = {one.name: one.backends for one in EVERY if one.part not in interface_table.APART}
    of = methods()
    for backend in backend_specs():
        module = importlib.import_module(f"lantern_accel_{backend}.backend")
        for name, kind in of.items():
            mine = getattr(module.DeviceBackend, name) is not getattr(kind, name)
            if mine and name in vars(module.DeviceBackend):
                assert backend in by_name[name], f"{backend} writes {name}"
            if backend == "null":
                assert (name in vars(module.DeviceBackend)) == (backend in by_name[name]), name
    assert "cpu" in by_name["fused_step"] and "null" not in by_name["capture"]
    noise = {one.name: one.backends for one in EVERY if one.part == "Preferences"}["noise_bytes"]
    assert "hpu" in noise


def test_every_name_of_the_interface_is_there() -> None:
    assert {name for name in device.__all__ if getattr(device, name, None) is None} == set()


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
