"""The benchmark: a run like a profile's, printed as a table, and resumed without being asked."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from support.profiles import small_ceilings

from lantern_accel_profiles.measure import samples
from lantern_accel_profiles.measure.reading import read_run
from lantern_accel_profiles.report.table import plain_rows

CELLS = ("--strategy", "vanilla", "--strategy", "eagle", "--repeats", "2")
ASKED = ("--prompt", "red heart", "--prompt", "dog face")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    small_ceilings(monkeypatch)


def test_the_table_has_a_ratio_to_vanilla(command, tiny_model, tmp_path):
    out = tmp_path / "bench.json"
    done = command("bench", "--model", tiny_model, *CELLS, *ASKED, "-o", out)
    assert done.returncode == 0, done.stderr
    # Below the table a busy machine is named, where it is one.
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| vanilla | 1 | ") and lines[2].endswith(" | 1.00 | 0.000 |")
    assert "left" in done.stderr  # an estimate before the long part
    run = read_run(out)
    assert run.state == "complete"
    assert run.quality == []
    assert run.settings.prompts.used == ["red heart", "dog face"]
    vanilla, eagle = plain_rows(run)
    assert vanilla["step_compression"] == 1
    assert 0 < vanilla["seconds_per_image"] < 60
    assert all(row["phase_ms"]["verify"] > 0 for row in (vanilla, eagle))
    assert run.environment.torch
    assert str(tmp_path) not in out.read_text()
    # All of it is there: nothing is measured for another form of it.
    done = command("bench", "--model", tiny_model, *CELLS, *ASKED, "-o", out, "--json")
    assert [row["strategy"] for row in json.loads(done.stdout)] == ["vanilla", "eagle"]


def test_settings_of_one_strategy_are_compared_in_a_line_and_a_plot(command, tiny_model, tmp_path):
    asked = "lantern:k=2,delta=0.1;lantern:k=3,delta=0.4;lantern++:k=2,lambda=2"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red heart\ndog face\n")
    words = ("bench", "--model", tiny_model, "--repeats", "2", "--prompts", prompts)
    done = command(*words, "--strategy", asked, "--plot", tmp_path / "a.png", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["strategy"] for row in rows] == ["vanilla", *asked.split(";")]
    loss = [row["total_variation_per_token"] for row in rows]
    assert loss[0] == 0 < loss[1] < loss[2]
    with Image.open(tmp_path / "a.png") as plot:
        assert plot.size[0] > 400
    for given, reason in (
        (("--plot", tmp_path / "a.txt"), ".png or .svg"),
        (("--prompt", "red heart"), "--prompts both"),
        (("--strategy", "vanilla,lantern:k=2"), "need ';'"),
    ):
        done = command(*words, *given)
        assert done.returncode == 2 and reason in " ".join(done.stderr.split())


@pytest.mark.long
def test_an_interrupted_run_goes_on_with_what_was_measured(
    command, tiny_model, tmp_path, monkeypatch
):
    out = tmp_path / "bench.json"
    words = ("bench", "--model", tiny_model, *CELLS, *ASKED, "-o", out)
    real, calls = samples.take_sample, []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*args, **kwargs)

    monkeypatch.setattr(samples, "take_sample", dying)
    assert command(*words).returncode == 130
    before = read_run(out)
    assert [len(cell.samples) for cell in before.cells] == [1, 1]
    monkeypatch.setattr(samples, "take_sample", real)
    assert command(*words).returncode == 0
    after = read_run(out)
    assert [len(cell.samples) for cell in after.cells] == [2, 2]
    assert [c.samples[0] for c in after.cells] == [c.samples[0] for c in before.cells]
    done = command(*words[:-4], "-o", out)
    assert done.returncode == 2
    assert "its list of prompts is" in done.stderr
    out.write_text("{}")
    assert "is JSON, but not a run of" in command(*words).stderr


def test_a_relaxed_row_says_what_exact_decoding_has_and_the_bound(command, tiny_model, tmp_path):
    out = tmp_path / "bench.json"
    words = (
        "--strategy",
        "eagle",
        "--strategy",
        "lantern++",
        "--drafts",
        "0,1,00",
        "--repeats",
        "1",
    )
    done = command("bench", "--model", tiny_model, *words, *ASKED, "-o", out)
    assert done.returncode == 0, done.stderr
    _, eagle, relaxed = plain_rows(read_run(out))
    assert relaxed["exact_step_compression"] == eagle["step_compression"]
    assert eagle["exact_step_compression"] is None
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("lantern++: exact")]
    assert f"{eagle['step_compression']:.2f} tok/step" in said
    assert f"{relaxed['total_variation_per_token']:.3f}" in said


@pytest.mark.parametrize(
    ("option", "value", "strategy"), [("--drafts", "0,1", "scd"), ("--window", "8", "eagle")]
)
def test_an_option_that_nothing_takes_is_refused(command, tiny_model, option, value, strategy):
    done = command("bench", "--model", tiny_model, "-s", strategy, option, value, *ASKED[:2])
    assert done.returncode == 2
    assert f"{option} changes none of vanilla, {strategy}" in done.stderr
