"""The range of torch: what is read, kept, run again and shown; real environments are made by hand."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[3]
NAMES = (
    "first command", "conform cpu", "conform hpu --software",
    "tests/unit/device", "tests/unit/strategy", "tests/unit/families", "tests/unit/decoding",
)  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_range_unit", ROOT / "tools/torch_range.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_range_unit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def ran(failed: int = 0, *notes: str) -> dict[str, Any]:
    return {"passed": 3, "failed": failed, "skipped": 1, "notes": list(notes), "seconds": 2.0}


class Pretended:
    """A place whose stages are decided here; ``calls`` lists what ran."""

    calls: ClassVar[list[str]] = []
    broken: ClassVar[dict[str, str]] = {}

    def __init__(self, version: str, folder: Path, limit: float) -> None:
        self.version, self.results = version, folder

    def install(self, python: str) -> dict[str, Any]:
        self.calls.append(f"{self.version} install")
        wrong = self.broken.get(self.version) == "install"
        return ran(int(wrong), *["failed: no room"] * wrong)

    def execute(self, stage: Any) -> dict[str, Any]:
        self.calls.append(f"{self.version} {stage.name}")
        if self.broken.get(self.version) == "interrupt":
            raise KeyboardInterrupt
        wrong = self.broken.get(self.version) == stage.name
        return ran(int(wrong), *["failed: one"] * wrong)

    def remove(self) -> None:
        self.calls.append(f"{self.version} remove")


@pytest.fixture
def place(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    monkeypatch.setattr(tool, "Place", Pretended)
    monkeypatch.setattr(tool, "commit", lambda: "abc")
    monkeypatch.setattr(Pretended, "calls", [])
    monkeypatch.setattr(Pretended, "broken", {})
    return Pretended


def test_the_range_begins_and_ends_where_the_project_says(tool: ModuleType) -> None:
    claimed = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert claimed is not None
    low, high = (tuple(map(int, one.split("."))) for one in claimed.groups())
    ends = [tuple(map(int, one.split(".")[:2])) for one in (tool.VERSIONS[0], tool.VERSIONS[-1])]
    assert ends == [low, (high[0], high[1] - 1)]


def test_the_first_command_is_the_readmes_and_the_tests_are_there(tool: ModuleType) -> None:
    words = tool.stages()[0].arguments[: -len(tool.FIRST)]
    said = " ".join(f'"{word}"' if " " in word else word for word in words)
    assert f"lantern-accel {said}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert [stage.name for stage in tool.stages()] == list(NAMES)
    assert all((ROOT / test).is_dir() for test in tool.TESTS)


def test_results_of_tests_and_of_the_kit_are_counted(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "unit.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped message="no card"/>'
        '</testcase><testcase name="c"><failure message="1 &lt; 0"/></testcase>'
        '<testcase name="d"><error message="gone"/></testcase></testsuite></testsuites>'
    )
    found = tool.stages()[-1].read(tmp_path / "unit.xml")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["notes"] == ["failed: c: 1 < 0", "failed: d: gone", "skipped, 1 tests: no card"]
    states = [("x", "passed"), ("y", "failed"), ("z", "not applicable")]
    outcomes = [{"name": name, "state": state, "detail": "why"} for name, state in states]
    (tmp_path / "cpu.json").write_text(json.dumps({"outcomes": outcomes}))
    found = tool.stages()[1].read(tmp_path / "cpu.json")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["notes"] == ["failed: y: why", "not applicable: z: why"]


def test_one_release_that_fails_does_not_stop_the_others(
    tool: ModuleType, place: type[Pretended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.broken.update({"2.6.0": "install", "2.9.0": "conform cpu"})
    output = tmp_path / "torch.md"
    assert tool.main(["2.6.0", "2.9.0", "2.13.0", "-o", str(output)]) == 2
    assert "not passed: torch 2.6.0, 2.9.0" in capsys.readouterr().err
    assert [one for one in place.calls if one.startswith("2.6.0")] == [
        "2.6.0 install",
        "2.6.0 remove",
    ]
    assert [one for one in place.calls if one.startswith("2.9.0")][1:-1] == [
        f"2.9.0 {name}" for name in NAMES
    ]
    text = output.read_text(encoding="utf-8")
    assert "- install: failed: no room" in text
    assert "- conform cpu: failed: one" in text
    row = next(line for line in text.splitlines() if line.startswith("| 2.9.0"))
    assert row.count("passed 3, skipped 1") == len(NAMES) and "**failed 1**" in row
    assert "| 2.11.0 |  |" + " not run |" * len(NAMES) in text
    assert "python tools/torch_range.py 2.6.0 2.9.0 2.11.0 2.14.1 2.15.0 -o docs/torch.md" in text


def test_an_interrupted_run_goes_on_where_it_stopped(
    tool: ModuleType, place: type[Pretended], tmp_path: Path
) -> None:
    command = ["2.6.0", "2.13.0", "-o", str(tmp_path / "torch.md"), "--keep", str(tmp_path)]
    place.broken.update({"2.6.0": "conform cpu", "2.13.0": "interrupt"})
    assert tool.main(command) == 130
    assert "2.13.0 remove" not in place.calls
    place.broken.clear()
    place.calls.clear()
    assert tool.main(command) == 0
    assert place.calls[:2] == ["2.6.0 install", "2.6.0 conform cpu"]
    assert place.calls[2:] == ["2.13.0 install", *(f"2.13.0 {name}" for name in NAMES)]
    place.calls.clear()
    assert tool.main(command) == 0
    assert not place.calls
    assert tool.main([*command, "--again"]) == 0
    assert len(place.calls) == 2 + 2 * len(NAMES)


def test_an_unfinished_release_starts_anew_on_another_commit(tool: ModuleType) -> None:
    names = ["install", *NAMES]
    whole = {"commit": "old", "stages": {name: ran() for name in names}}
    assert tool.left_over(whole, "new", names) == whole
    part = {"commit": "old", "stages": {"install": ran(), "conform cpu": ran(1)}}
    assert tool.left_over(part, "new", names) == {"commit": "new", "stages": {}}
    assert tool.left_over(part, "old", names)["stages"] == {"install": ran()}


def test_a_stage_without_a_result_or_too_slow_is_a_failure(
    tool: ModuleType, tmp_path: Path
) -> None:
    here = tool.Place("2.6.0", tmp_path, 1.5)
    here.results.mkdir()
    (here.environment / "bin").mkdir(parents=True)
    program = here.environment / "bin" / "lantern-accel"
    program.write_text("#!/bin/sh\necho no kernel in $0; exit 3\n")
    program.chmod(0o755)
    stage = tool.stages()[0]
    found = here.execute(stage)
    assert (found["failed"], found["notes"]) == (
        1,
        ["failed: no kernel in torch-2.6.0/bin/lantern-accel"],
    )
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    found = here.execute(stage)
    assert found["failed"] == 1 and found["seconds"] < 30
    assert "stopped after" in found["notes"][0]
    here.remove()  # no virtual environment: whatever it is, it is not ours
    assert here.environment.is_dir()


def test_a_version_that_is_none_is_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["2.6", "-o", str(tmp_path / "torch.md")]) == 2
    assert "write it as 2.6.0" in capsys.readouterr().err
