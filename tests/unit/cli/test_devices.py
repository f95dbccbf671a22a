"""``lantern-accel devices`` as a user sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from support import native

from lantern_accel.cli import main
from lantern_accel.device import plugins
from lantern_accel.device.plugins import DeviceStatus, open_backend
from lantern_accel.families import releases
from lantern_accel_cpu.native import build, library
from lantern_accel_profiles.measure.environment import describe

READY = DeviceStatus(name="abacus", state="ready", devices=("10 rods", "10 rods", "5 rods"))
ABSENT = DeviceStatus(
    name="slate", state="not available", reason="there is no chalk " * 20, install="buy chalk"
)
BROKEN = DeviceStatus(name="sand", state="broken", reason="ImportError: no tray")


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "devices_report", lambda: [READY, ABSENT, BROKEN])
    libraries = {"transformers": "5.19.0", "sglang": "0.5.24"}
    monkeypatch.setattr(releases, "find_release", libraries.get)


def test_verbose_says_why_steps_run_operator_by_operator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["devices", "null", "--verbose", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["own_steps"]
    assert {"plain decoding, whole steps", "a window, whole steps"} <= set(steps)
    assert all("no steps of its own" in why for why in steps.values())
    assert main(["devices", "null", "--verbose"]) == 0
    assert "plain decoding, whole steps: operator by operator" in capsys.readouterr().out


@pytest.mark.usefixtures("report")
def test_one_whole_line_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "abacus: ready (2 x 10 rods; 5 rods)",
        f"slate: not available: {ABSENT.reason}; buy chalk",
        "sand: broken: ImportError: no tray",
        "transformers: 5.19.0, a tested release",
        f"sglang: {releases.problem('sglang')}",
    ]
    assert "only releases from 0.5.23 to before 0.5.24" in str(releases.problem("sglang"))


@pytest.mark.usefixtures("report")
def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [DeviceStatus.model_validate(one) for one in found] == [READY, ABSENT, BROKEN]


def test_the_real_report_names_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cpu: ready (") for line in lines)
    assert len(lines) >= 4


def test_opening_a_device_prints_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "null"]) == 0
    out = capsys.readouterr().out
    assert "backend: null\n" in out
    assert "memory_bytes: unknown\n" in out
    assert main(["devices", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "cpu"


@native.needs_native
def test_the_unit_that_multiplies_is_a_note_of_its_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = build.chosen_units()[0]
    words = f"native kernels: {unit}: {library.MULTIPLY[unit]}"
    monkeypatch.delenv(build.UNIT_VARIABLE, raising=False)
    assert main(["devices", "cpu"]) == 0
    assert words in capsys.readouterr().out
    monkeypatch.setenv(build.UNIT_VARIABLE, unit)
    assert main(["devices", "cpu", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert words in notes and f"the unit that {build.UNIT_VARIABLE} names" in notes
    with open_backend("cpu") as backend:
        assert words in describe(backend, torch.float32).device.notes


@pytest.mark.parametrize(
    ("device", "code"), [("abacus", 2), ("cpu:9", 4), ("cpu:", 2), ("auto:0", 2)]
)
def test_a_device_that_cannot_be_opened_is_one_line_and_its_exit_code(
    device: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", device]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from lantern_accel.cli import main\n"
        "assert main(['--help']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
