"""A stranger's backend: one import and one fixture give it a pytest case a check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lantern_accel.testing import CHECKS

ROOT = Path(__file__).parents[2]

TOY = """
import pytest
import torch

from lantern_accel.device.backend import Backend, DeviceFacts
from lantern_accel.testing import *


class Abacus(Backend):
    name, version = "abacus", "1.0"

    def facts(self):
        return DeviceFacts(
            backend=self.name, device=str(self.device), name="Abacus", torch=torch.__version__
        )

    def synchronize(self):
        pass

    def checks(self):
        return {"beads.counted": lambda backend: Measured("ten")}


@pytest.fixture(scope="module")
def backend():
    with Abacus(torch.device("cpu")) as opened:
        yield opened
"""

BROKEN = """

class Wrong(Abacus):
    def write(self, kv, layer, address, k, v):
        super().write(kv, layer, address, k, v)
        if k.shape[1] < kv.layout.capacity:  # a write of some slots spills into a whole row
            kv.keys[layer][: kv.layout.capacity] += 1

    def checks(self):
        def lost(backend):
            raise Failed("a bead is lost")

        return {"beads.counted": lost}


@pytest.fixture(scope="module")
def backend():
    return Wrong(torch.device("cpu"))
"""


def collect(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_abacus.py").write_text(text)
    paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    call = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "-q",
        "-rA",
        *words,
    ]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True)


def test_one_import_and_one_fixture_give_a_case_a_check(tmp_path: Path) -> None:
    listed = collect(tmp_path, TOY, "--collect-only").stdout
    for name in CHECKS:
        assert f"::test_conforms[{name}]\n" in listed, name
    assert listed.count("::test_conforms") == len(CHECKS) + 1
    done = collect(tmp_path, TOY, "-k", "kv or attention or accept or device. or own")
    assert done.returncode == 0, done.stdout
    for name in ("conforms[kv.slots]", "conforms[accept.ties]", "conforms_to_its_own_checks"):
        assert f"PASSED test_abacus.py::test_{name}" in done.stdout
    assert "reads no energy meter" in done.stdout


def test_a_fault_fails_its_own_case_alone(tmp_path: Path) -> None:
    done = collect(tmp_path, TOY + BROKEN, "-k", "kv.round_trip or kv.slots or own")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [line.split(" ")[1].partition("::")[2] for line in failed] == [
        "test_conforms[kv.slots]",
        "test_conforms_to_its_own_checks",
    ]
    assert "beads.counted: a bead is lost" in done.stdout


def test_the_kit_itself_does_not_need_pytest() -> None:
    script = "import sys, lantern_accel.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
