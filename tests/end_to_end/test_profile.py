"""Profiling through the command: the protocol kept, nothing lost, every fault told."""

from __future__ import annotations

import json
import sys

import pytest
from support.profiles import FEW, PROMPTS, STRATEGIES, small_ceilings

from lantern_accel.cli import main
from lantern_accel.device.backend import Stopwatch
from lantern_accel_profiles.measure.reading import read_run
from lantern_accel_profiles.measure.record import PHASES, Interval

pytestmark = pytest.mark.usefixtures("small_ceilings")


@pytest.fixture(scope="module")
def measured(tiny_model, prompt_file, tmp_path_factory):
    """One run of the tiny model through the command."""
    folder = tmp_path_factory.mktemp("profiled")
    out = folder / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_ACCEL_CACHE", str(folder / "cache"))
        small_ceilings(patch)
        words = ["profile", "--device", "cpu", "--model", str(tiny_model), *FEW, "-o", str(out)]
        words += [
            "--prompts",
            str(prompt_file),
            "--batch",
            "1",
            "--batch",
            "2",
            "--trace",
            str(folder / "trace.json"),
        ]
        patch.setattr(sys, "argv", ["lantern-accel", *words])
        assert main(words) == 0
    return out


def test_a_run_has_what_the_protocol_promises(measured):
    run = read_run(measured)
    assert run.state == "complete"
    assert run.command.startswith("lantern-accel profile --device cpu")
    assert {(c.strategy.name, c.batch) for c in run.cells} == {
        (name, batch) for name in STRATEGIES.split(",") for batch in (1, 2)
    }
    assert run.clock.stopwatch == Stopwatch.name
    assert run.ceilings.copy_bytes_per_s > 0
    assert run.environment.device.backend == "cpu"
    assert run.environment.versions["torch"]
    assert run.settings.prompts.used == list(PROMPTS)
    for cell in run.cells:
        assert len(cell.warmup) >= 3
        assert cell.cold_seconds > 0
        assert cell.memory.definition
        assert set(cell.step_ms) == {"draft", "verify", "accept", "commit", "host"}
        assert len(cell.samples) == 2
        for sample in cell.samples:
            assert sample.images == cell.batch
            assert sample.tokens == 16 * cell.batch
            assert 0 < sample.decode < sample.total <= sample.wall
    assert {cell.step_ms["draft"] > 0 for cell in run.cells if cell.strategy.name == "eagle"} == {
        True
    }


def test_strategies_take_turns(measured):
    run = read_run(measured)
    for batch in (1, 2):
        taken = sorted(
            (sample.order, cell.strategy.name, sample.round)
            for cell in run.cells
            if cell.batch == batch
            for sample in cell.samples
        )
        rounds = [number for _, _, number in taken]
        assert rounds == sorted(rounds)
        assert all({n for _, n, r in taken if r == number} == set(STRATEGIES.split(","))
                   for number in set(rounds))  # fmt: skip
        # All strategies of a round draw the same prompts.
        seeds = {cell.samples[0].seed for cell in run.cells if cell.batch == batch}
        assert len(seeds) == 1


def test_every_relaxed_strategy_has_its_price(measured):
    run = read_run(measured)
    (quality_loss,) = run.quality
    assert quality_loss.strategy.name == "lantern++"
    assert isinstance(quality_loss.total_variation_per_token, Interval)
    assert 0 <= quality_loss.agreement.value <= 1
    assert quality_loss.images == 4
    assert {strip.strategy for strip in run.contact_sheet} == {"vanilla", "lantern++"}
    assert run.conformance == (
        "not measured: a quick run leaves it out; `lantern-accel conform cpu -o checks.json` checks "
        "it, and `lantern-accel compare` takes that file too"
    )


def test_a_trace_names_the_phases(measured):
    trace = json.loads((measured.parent / "trace.json").read_text())
    events = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    phases = {"draft", "verify", "accept", "commit"}
    assert {one["name"] for one in events} == {
        "text",
        "text and prefill",
        "step",
        "pixels",
        *phases,
    }
    request = [one for one in events if one["tid"] == 1]
    steps = [one for one in request if one["name"] == "step"]
    # Every token but prefill's is drawn by a step: itself, or as an accepted draft of it.
    assert sum(1 + accepted for one in steps for accepted in one["args"]["accepted"]) >= 15
    assert len(steps[0]["args"]["accepted"]) == 1
    ends = [(one["ts"], one["ts"] + one["dur"]) for one in sorted(request, key=lambda e: e["ts"])]
    assert all(0 <= began <= ended for began, ended in ends)


@pytest.mark.long
def test_reports_are_made_from_runs(command, measured, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.json"
    data = json.loads(measured.read_text())
    other.write_text(json.dumps(data | {"name": "other"}))
    for kind in ("html", "md", "json"):
        out = tmp_path / f"report.{kind}"
        done = command("compare", measured, other, tmp_path / "none-*.json", "-o", out)
        assert done.returncode == 0, done.stderr
        assert "nothing matches" in done.stderr
        text = out.read_text()
        assert all(phase in text for phase in PHASES)
        assert "lantern++" in text
    assert "Images per second over seconds" in (tmp_path / "report.html").read_text()
    before = other.read_text()
    done = command("compare", measured, other, "-o", other)
    assert (done.returncode, other.read_text()) == (2, before)
    assert "is one of the files to compare" in done.stderr
    done = command("compare", measured, f"again={measured}", "-o", tmp_path / "report.md")
    assert done.returncode == 0, done.stderr
    done = command("compare", measured)
    assert done.returncode == 0, done.stderr
    assert "| lantern++ |" in done.stdout and "Appendix" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next: add -o report.html")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["settings"].update(weights_hash="f" * 16), "model hash is"),
        (lambda d: d.update(quality=[]), "relaxed strategy without its quality figures"),
    ],
)
def test_faults_are_refused_in_one_line(command, measured, tmp_path, change, says):
    data = json.loads(measured.read_text())
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(data | {"name": "cpu run"}))
    data["name"] = "another"
    change(data)
    second.write_text(json.dumps(data))
    done = command("compare", first, second, "-o", tmp_path / "report.md")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "report.md").exists()


def test_the_command_refuses_before_it_loads(command, tiny_model, tmp_path):
    out = tmp_path / "run.json"
    out.write_text("{}")
    done = command("profile", "--device", "cpu", "--model", tiny_model, "-o", out)
    assert (done.returncode, out.read_text()) == (2, "{}")
    assert "exists already" in done.stderr
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("red heart\n\N{SNOWMAN}\n")
    words = ("profile", "--device", "cpu", "--model", tiny_model, "-o", tmp_path / "new.json")
    for more, says in (
        (("--prompts", unknown, *FEW), "has no word that this model knows"),
        (("--quick", "--strategy", "lantern"), "k = 1000 is too many for a codebook of 48"),
    ):
        done = command(*words, *more)
        assert done.returncode == 2
        assert says in done.stderr
        assert not (tmp_path / "new.json").exists()
    done = command("compare", tmp_path / "none-*.json", "-o", tmp_path / "a.html")
    assert done.returncode == 2
    assert "there is no run to report on" in done.stderr
    done = command("compare", out, "-o", tmp_path / "a.pdf")
    assert "does not say which kind of report" in done.stderr
