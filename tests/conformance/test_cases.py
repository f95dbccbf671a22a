"""A stranger's backend: one import and one fixture give it a pytest case a check."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lantern_accel.testing import CHECKS

TOY = """
import pytest

from lantern_accel.device.backend import Conformance
from lantern_accel.testing import Failed
from lantern_accel.testing.cases import test_conforms, test_conforms_to_its_own_checks
from support.faults import scaffold


class Wrong(scaffold()):
    def write(self, kv, layer, address, k, v):
        super().write(kv, layer, address, k, v)
        if k.shape[1] < kv.layout.capacity:  # a write of some slots spills into a whole row
            kv.keys[layer][: kv.layout.capacity] += 1

    def conformance(self):
        def lost(backend):
            raise Failed("a bead is lost")

        return Conformance(checks={"beads.counted": lost})


@pytest.fixture(scope="module")
def backend():
    return Wrong(0)
"""


class Ends:
    """How each case of an inner run ended, and what it said."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.said = ""
        self.collected: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected.append(item.name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2]
            self.states[name] = report.outcome
            self.said += f"{name}: {report.longrepr}\n"


def collect(folder: Path, text: str, *words: str) -> Ends:
    """Run a stranger's test module as pytest would; a process of its own would prove no more."""
    path = folder / f"test_{folder.name}.py"
    path.write_text(text)
    ends = Ends()
    plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error", "-q", "-c", os.devnull]
    pytest.main([str(path), f"--rootdir={folder}", *plain, *words], plugins=[ends])
    return ends


def test_one_import_and_one_fixture_give_a_case_a_check(tmp_path: Path) -> None:
    """A fault fails its own case alone."""
    ends = collect(tmp_path, TOY, "-k", "kv. or accept.ties or energy or conforms_to")
    own = "test_conforms_to_its_own_checks"
    assert set(ends.collected) == {own, *(f"test_conforms[{name}]" for name in CHECKS)}
    names = {name for name in CHECKS if name.startswith("kv.")} | {"accept.ties", "device.energy"}
    want = {f"test_conforms[{name}]": "passed" for name in names} | {own: "failed"}
    failed = dict.fromkeys(("test_conforms[kv.sentinels]", "test_conforms[kv.slots]"), "failed")
    assert ends.states == want | failed | {"test_conforms[device.energy]": "skipped"}
    assert "beads.counted: a bead is lost" in ends.said
    assert "reads no energy meter" in ends.said
