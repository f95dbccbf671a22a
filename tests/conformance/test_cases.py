"""A stranger's backend: one import and one fixture give it a pytest case a check."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lantern_accel.testing import CHECKS

TOY = """
import pytest

from lantern_accel.device.backend import Conformance
from lantern_accel.testing import Failed, Measured
from lantern_accel.testing.cases import test_conforms, test_conforms_to_its_own_checks
from support.faults import scaffold


class Abacus(scaffold()):
    def conformance(self):
        return Conformance(checks={"beads.counted": lambda backend: Measured("ten")})


@pytest.fixture(scope="module")
def backend():
    with Abacus(0) as opened:
        yield opened
"""

BROKEN = """

class Wrong(Abacus):
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
    ends = collect(tmp_path, TOY, "-k", "kv or attention or accept or device. or conforms_to")
    assert set(ends.collected) == {f"test_conforms[{name}]" for name in CHECKS} | {
        "test_conforms_to_its_own_checks"
    }
    for name in ("conforms[kv.slots]", "conforms[accept.ties]", "conforms_to_its_own_checks"):
        assert ends.states[f"test_{name}"] == "passed"
    assert "failed" not in ends.states.values(), ends.said
    assert ends.states["test_conforms[device.energy]"] == "skipped"
    assert "reads no energy meter" in ends.said


def test_a_fault_fails_its_own_case_alone(tmp_path: Path) -> None:
    ends = collect(tmp_path, TOY + BROKEN, "-k", "kv.round_trip or kv.slots or conforms_to")
    assert ends.states == {
        "test_conforms[kv.round_trip]": "passed",
        "test_conforms[kv.slots]": "failed",
        "test_conforms_to_its_own_checks": "failed",
    }
    assert "beads.counted: a bead is lost" in ends.said
