"""The benchmark: its table, its JSON, and going on after an interruption."""

from __future__ import annotations

import json

import pytest

import lantern_accel
from lantern_accel.errors import RequestError
from lantern_accel.measure import bench

CELLS = ("--strategy", "vanilla", "--strategy", "eagle", "--repeats", "2")


def test_the_table_has_a_ratio_to_vanilla(command, tiny_model, tmp_path):
    out = tmp_path / "bench.json"
    done = command("bench", "--model", tiny_model, *CELLS, "--prompt", "red heart", "-o", out)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert "| vanilla | 1 | 1 |" in lines[2]
    assert " 1.00x | 1.00 | 1.00 | 0.000 |" in lines[2]
    report = bench.BenchReport.model_validate_json(out.read_text())
    vanilla, eagle = report.rows()
    assert vanilla["step_compression"] == 1
    assert eagle["conversion"] == eagle["speedup"] / eagle["step_compression"]
    assert all(row["phase_ms"]["verify"] > 0 for row in report.rows())
    assert report.environment["torch"]


def test_an_interrupted_run_goes_on_with_what_was_measured(tiny_model, tmp_path, monkeypatch):
    out = tmp_path / "bench.json"
    real, calls = bench.decode_once, []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:  # a warm-up and the phases of two, two samples, then the plug
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        strategies = [pipe.strategy("vanilla"), pipe.strategy("eagle")]
        run = {"repeats": 2, "prompts": ["red heart"], "out": out}
        monkeypatch.setattr(bench, "decode_once", dying)
        with pytest.raises(KeyboardInterrupt):
            bench.run_bench(pipe, strategies, **run)
        before = bench.BenchReport.model_validate_json(out.read_text())
        assert [len(cell.samples) for cell in before.cells] == [1, 1]
        monkeypatch.setattr(bench, "decode_once", real)
        after = bench.run_bench(pipe, strategies, **run)
        assert [len(cell.samples) for cell in after.cells] == [2, 2]
        assert [c.samples[0] for c in after.cells] == [c.samples[0] for c in before.cells]
        with pytest.raises(RequestError, match="prompts"):
            bench.run_bench(pipe, strategies, repeats=2, prompts=["dog face"], out=out)
        out.write_text("{}")
        with pytest.raises(RequestError, match="not a benchmark"):
            bench.run_bench(pipe, strategies, **run)


def test_phases_are_measured_on_a_device_that_is_waited_for(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        waits = []
        pipe.backend.synchronize = lambda: waits.append(1)  # type: ignore[method-assign]
        with bench.timed_phases(pipe) as sums, pipe.backend.phase("draft"):
            pass
        assert len(waits) == 2
        assert set(sums) == set(bench.PHASES)
        assert "phase" not in vars(pipe.backend)


def test_json_rows(command, tiny_model):
    done = command("bench", "--model", tiny_model, *CELLS, "--prompt", "red heart", "--json")
    assert [row["strategy"] for row in json.loads(done.stdout)] == ["vanilla", "eagle"]
