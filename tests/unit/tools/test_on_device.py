"""The measuring command's further parts: variants, races, limits, targets, a tree not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.runs import invented_run

from lantern_accel.measure.stepcost import Cost, StepCost

TOOLS = Path(__file__).parents[3] / "tools"
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"attention": "triton"})


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_device_unit", TOOLS / "on_device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_device_unit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_default_options_come_first_and_with_every_batch(tool, tmp_path: Path) -> None:
    clones = {"llamagen": Path("x"), "lantern": Path("y")}
    plan = tool.stages("abacus", tmp_path, False, variants=VARIANTS, sizes=["s"], clones=clones)
    by_name = {stage.name: stage.arguments for stage in plan}
    last = list(by_name)[-5:]
    assert last == [
        "stepcost-s", "conform-attention=triton", "stepcost-s-attention=triton",
        "race_official", "race_lantern",
    ]  # fmt: skip
    assert by_name["stepcost-s"].count("--batch") == 3
    assert by_name["stepcost-s-attention=triton"].count("--batch") == 1
    assert "--option=attention=triton" in by_name["conform-attention=triton"]
    assert by_name["race_official"].count("--runner=gpt-fast") == 1
    assert [stage.script for stage in plan][-2:] == ["race_official.py", "race_lantern.py"]
    quick = tool.stages("abacus", tmp_path, True, variants=VARIANTS)
    assert [s.name for s in quick if s.name.startswith("step")] == ["stepcost-llamagen-xl-384"]


def test_a_stage_that_takes_too_long_is_stopped(tool, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time; print('slow', flush=True); time.sleep(60)")
    stage = tool.Stage("slow", [], tmp_path / "slow.json", str, script=str(script))
    works, seconds = tool.run(stage, tmp_path, os.environ, 1.5)
    assert not works and seconds < 30
    assert "the minutes that were given are over" in (tmp_path / "slow.log").read_text()


def test_no_stage_begins_when_no_time_is_left(
    tool, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second of each minute's sixty is kept; a tenth of a minute is over after the first stage.
    arguments = ["--device", "null", "-o", str(tmp_path), "--only", "device", "--only", "bench"]
    clock = iter([0.0, 0.0, 1000.0])
    # The tool's own clock: threads of other tests read the module's.
    watch = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(tool, "time", watch)
    assert tool.main([*arguments, "--minutes", "1"]) == 4
    said = capsys.readouterr()
    assert "no time is left" in said.out
    assert "stages failed: bench" in said.err


def test_a_tree_that_is_not_installed_is_found_all_the_same(
    tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(tool.importlib.metadata, "distribution", absent)
    environ = tool.environment(tmp_path)
    site, root, backends, *_ = environ["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "lantern_accel").is_dir() and Path(backends).name == "backends"
    (found,) = importlib.metadata.distributions(path=[site])
    assert found.metadata["Name"] == "lantern-accel"
    points = {one.name: one.value for one in found.entry_points if one.group == "lantern_accel"}
    assert {"cpu", "cuda", "hpu", "null"} <= set(points)
    assert points["cpu"] == "lantern_accel_cpu"


def _stored(out: Path) -> None:
    measured = invented_run()
    assert not isinstance(measured.ceilings, str)
    rates: dict[str, Any] = {"copy_bytes_per_s": 1e11, "read_bytes_per_s": 1e11}
    rates["matmul_flops"] = {"bfloat16": 1e11}
    costs = [
        Cost(kind="vanilla", label="vanilla", batch=1, nodes=1, ms=[20.0], vanilla_ms=[20.0],
             floor_bytes=int(1.6e9)),
        Cost(kind="step", label="lantern++", batch=1, nodes=58, ms=[30.0], vanilla_ms=[20.0],
             floor_bytes=int(1.9e9)),
    ]  # fmt: skip
    settings = {"dtype": "bfloat16"}
    report = StepCost(settings=settings, environment=measured.environment, costs=costs)
    report.ceilings = measured.ceilings.model_copy(update=rates)
    (out / "stepcost-llamagen-xl-384.json").write_text(report.model_dump_json())


def test_targets_are_met_missed_or_not_measured(tool, tmp_path: Path) -> None:
    tool.write_report("abacus", tmp_path, {})
    assert "asked of a card" not in (tmp_path / "report.md").read_text()
    _stored(tmp_path)
    found = {(one["size"], one["step"]): one for one in tool.targets(tmp_path)}
    vanilla = found["llamagen-xl-384", "vanilla"]
    assert (vanilla["found"], vanilla["met"]) == (pytest.approx(0.8), True)
    whole = found["llamagen-xl-384", "lantern++"]
    assert (whole["found"], whole["met"]) == (pytest.approx(1.5), False)
    assert found["llamagen-3b-384", "vanilla"]["met"] is None
    tool.write_report("abacus", tmp_path, {})
    text = (tmp_path / "report.md").read_text()
    assert "| llamagen-xl-384 | lantern++ | over vanilla | 1.35 | 1.50, missed (default) |" in text
    assert "| llamagen-xl-384 | vanilla | of floor | 0.75 | 0.80, met (default) |" in text
    assert "| llamagen-3b-384 | vanilla | of floor | 0.75 | not measured |" in text
    assert json.loads((tmp_path / "report.json").read_text())["targets"][0]["met"] is True


def test_the_best_options_are_judged_against_what_the_card_can_reach(tool, tmp_path: Path) -> None:
    _stored(tmp_path)
    path = tmp_path / "stepcost-llamagen-xl-384.json"
    slow = json.loads(path.read_text())
    fast = json.loads(path.read_text())
    fast["costs"][1]["ms"] = [26.0]
    (tmp_path / "stepcost-llamagen-xl-384-attention=triton.json").write_text(json.dumps(fast))

    def whole() -> dict[str, Any]:
        found = {(one["size"], one["step"]): one for one in tool.targets(tmp_path)}
        return found["llamagen-xl-384", "lantern++"]

    one = whole()
    assert (one["found"], one["options"], one["met"]) == (
        pytest.approx(1.3),
        "attention=triton",
        True,
    )
    # 58 rows cost 40 ms of products here: no card is asked for less than its floors are apart.
    slow["costs"][1] |= {"floor_flops": int(4e9), "ms": [48.0]}
    path.write_text(json.dumps(slow))
    (tmp_path / "stepcost-llamagen-xl-384-attention=triton.json").unlink()
    one = whole()
    assert (one["asked"], one["found"]) == (pytest.approx(40 / 16 * 1.1), pytest.approx(2.4))
    assert one["met"] is True


def test_every_variant_is_measured_on_every_size(tool, tmp_path: Path) -> None:
    names = [one.name for one in tool.stages("abacus", tmp_path, False, variants=VARIANTS)]
    for size in ("llamagen-xl-384", "llamagen-3b-384"):
        assert {f"stepcost-{size}", f"stepcost-{size}-attention=triton"} <= set(names)


def test_step_costs_and_races_are_shown_as_their_tables(tool, tmp_path: Path) -> None:
    _stored(tmp_path)
    stored = json.loads((tmp_path / "stepcost-llamagen-xl-384.json").read_text())
    assert "| lantern++ | 1 | 58 | 30.000 |" in tool.stepcost_text(stored)
    lap = {"seconds": 2.0, "cpu_seconds": 1.0, "work": {"tokens": 100}}
    runner = {"name": "official", "laps": [lap]}
    where = invented_run().environment.model_dump(mode="json")
    race = {"settings": {}, "environment": where, "runners": [runner], "checks": {"alike": 8}}
    assert tool.race_text(race).endswith("{'alike': 8}")
    assert "| official | tokens | 20.000 |" in tool.race_text(race)
