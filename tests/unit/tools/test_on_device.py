"""The measuring command's further parts: variants, races, limits, targets, a tree not installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import on_device as tool
import pytest
import step_kernels
from support.runs import invented_run

from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.measure.record import StepCell

TOOLS = Path(__file__).parents[3] / "tools"


def slow_stage(folder: Path, *lines: str, **more: Any) -> Any:
    script = folder / "slow.py"
    script.write_text("\n".join(["import signal, sys, time", *lines]))
    return tool.Stage("slow", [], folder / "slow.json", str, script=str(script), **more)


@pytest.mark.long
def test_a_stage_that_takes_too_long_is_interrupted_then_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    patient = ["try:", "    time.sleep(60)", "finally:", f"    open({str(kept)!r}, 'w').close()"]
    stage = slow_stage(tmp_path, *patient)
    works, seconds = tool.run(stage, tmp_path, os.environ, 1.5)
    assert not works and seconds < 30
    assert kept.is_file(), "it could not clean up"
    assert "its time is over" in (tmp_path / "slow.log").read_text()
    monkeypatch.setattr(tool, "PATIENCE", 0.5)
    deaf = ["signal.signal(signal.SIGINT, signal.SIG_IGN)", "time.sleep(60)"]
    works, seconds = tool.run(slow_stage(tmp_path, *deaf), tmp_path, os.environ, 1.5)
    assert not works and seconds < 30


def test_what_was_stopped_is_resumed(tmp_path: Path) -> None:
    lines = ["print('went', *sys.argv[1:], flush=True)", "open('slow.json', 'w').write('{}')"]
    script = [f"import os; os.chdir({str(tmp_path)!r})", *lines]
    for said in ("went\n", "went --resume\n"):
        stage = slow_stage(tmp_path, *script, resume="--resume")
        works, _ = tool.run(stage, tmp_path, os.environ)
        assert works and (tmp_path / "slow.log").read_text() == said


def test_what_was_stopped_waits_for_what_has_not_begun(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def run(stage: Any, folder: Path, environ: Any, limit: float) -> tuple[bool, float]:
        limits[stage.name] = limit
        (folder / f"{stage.name}.log").write_text("as far as it came")
        works = stage.name != "conform"
        if works:
            stage.result.write_text("{}")
        return works, 0.0 if works else limit

    monkeypatch.setattr(tool, "run", run)
    arguments = ["--device", "null", "-o", str(tmp_path), "--only", "conform", "--only", "tune"]
    arguments += ["--minutes", "5"]
    assert tool.main([*arguments[:6], *arguments[8:]]) == 0
    assert "goes on with: conform" in capsys.readouterr().out
    first = limits.pop("conform")
    assert first == pytest.approx(120, abs=1) and not limits
    assert tool.main(arguments) == 0
    assert list(limits) == ["tune", "conform"]
    assert limits["conform"] == pytest.approx(2 * first, abs=2)
    entry = json.loads((tmp_path / "report.json").read_text())["stages"]["conform"]
    assert (entry["works"], entry["stopped"]) == (False, 2)


def test_the_tree_is_small_enough_to_travel() -> None:
    """64 MiB go to a machine without a network: the tracked files, wheels, and what is measured there."""
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=TOOLS.parent, capture_output=True)
    if done.returncode:
        pytest.skip("the tests do not run in a clone")
    paths = [TOOLS.parent / os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    assert sum(path.lstat().st_size for path in paths if path.exists()) < 58 * 2**20


def _stored(out: Path) -> None:
    measured = invented_run()
    assert not isinstance(measured.ceilings, str)
    rates: dict[str, Any] = {"copy_bytes_per_s": 1e11, "read_bytes_per_s": 1e11}
    rates["matmul_flops"] = {"bfloat16": 1e11}
    steps = [
        StepCell(kind="vanilla", strategy=Strategy(name="vanilla"), batch=1, nodes=1, ms=[20.0],
                 vanilla_ms=[20.0], floor_bytes=int(1.6e9)),
        StepCell(kind="step", strategy=Strategy(name="lantern++"), batch=1, nodes=58, ms=[30.0],
                 vanilla_ms=[20.0], floor_bytes=int(1.9e9)),
    ]  # fmt: skip
    ceilings = measured.ceilings.model_copy(update=rates)
    report = invented_run(cells=[], quality=[], contact_sheet=[], steps=steps, ceilings=ceilings)
    (out / "stepcost-llamagen-xl-384.json").write_text(report.model_dump_json())


def test_targets_are_met_missed_or_not_measured(tmp_path: Path) -> None:
    (tmp_path / "stepcost-llamagen-3b-384.json").write_text("{")  # killed while it was written
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
    assert "| llamagen-xl-384 | lantern++ | over plain | 1.35 | 1.50, missed (default) |" in text
    assert "| llamagen-xl-384 | vanilla | of floor | 0.7 | 0.80, met (default) |" in text
    assert "| llamagen-3b-384 | vanilla | of floor | 0.75 | not measured |" in text
    assert json.loads((tmp_path / "report.json").read_text())["targets"][0]["met"] is True


def test_the_kernels_of_a_step_are_listed_and_what_is_kept_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache/kernels"
    kept.mkdir(parents=True)
    (kept / "card.json").write_text('{"kernels": {"few": "passed"}}')
    tool.write_report("abacus", tmp_path, {})
    assert '"few": "passed"' in (tmp_path / "report.md").read_text()
    size = tmp_path / "tiny.json"
    size.write_text(
        '{"dim": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "grid": 6, "prefix_length": 3}'
    )
    out = tmp_path / "kernels.json"
    assert step_kernels.main([str(size), "--device", "cpu", "--window", "4", "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [step["step"] for step in found["steps"]] == ["vanilla", "scd"]
    assert all(step["ms"] > 0 and step["kernels"][0]["us"] > 0 for step in found["steps"])
    (stage,) = (one for one in tool.stages("a", tmp_path, False) if one.name.startswith("kernels-"))
    assert stage.script == "step_kernels.py" and "| aten::" in stage.show(found)
