"""The load client against a server: what it counts is what happened."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from support.server import serving

from lantern_accel.serving.scheduler import ServerSettings
from lantern_accel_profiles.load import service
from lantern_accel_profiles.load.__main__ import main
from lantern_accel_profiles.load.levels import quantiles
from lantern_accel_profiles.measure import environment
from lantern_accel_profiles.measure.reading import check_comparable, read_run
from lantern_accel_profiles.measure.record import is_measured


@pytest.mark.parametrize("partials", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_load_counts_what_came_and_what_did_not(tiny_model, tmp_path, partials, capsys):
    (tmp_path / "prompts").write_text("red heart\ndog face\n")
    with serving(tiny_model, ServerSettings(slots=3, queue=8, grace=30)) as served:
        words = ["--url", served.url, "--requests", "24", "--concurrency", "12", "--deadline", "99"]
        words += ["--strategy", "eagle", "--prompts", str(tmp_path / "prompts")]
        words += ["--partials", str(partials), "-o", str(tmp_path / "load.json")]
        assert main(words) == 0  # those who found the queue full came again
        found = json.loads((tmp_path / "load.json").read_text())
        assert "images/s" in capsys.readouterr().out
        (tmp_path / "prompts").write_text("red heart\ndog face\n" + "longer than is taken " * 300)
        assert main(words) == 1
    outcomes = json.loads((tmp_path / "load.json").read_text())["outcomes"]
    assert outcomes["ok"] + outcomes["failed"] == 24 and outcomes["failed"] >= 7
    assert found["outcomes"] == {"ok": 24}
    counted = [one for one in found["samples"] if one["counted"]]
    assert len(counted) == 24 and len({(one["prompt"], one["seed"]) for one in counted}) == 24
    assert found["joules_per_image"] is None and found["meter"] is None
    assert found["latency_s"]["p50"] <= found["latency_s"]["p99"] <= found["latency_s"]["max"]
    assert found["goodput_per_s"] == found["images_per_s"] > 0
    assert (found["first_partial_s"] is None) == (partials == 0)


def test_quantiles_are_values_that_were_seen():
    assert quantiles([]) is None
    assert quantiles([1.0, 2.0, 3.0]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    hundred = quantiles([float(n) for n in range(1, 101)])
    assert hundred == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


def test_a_search_finds_the_largest_load_and_goes_on_from_its_file(
    tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(environment, "busy_note", str)
    out = tmp_path / "load.json"
    (tmp_path / "prompts").write_text("red heart\ndog face\n" + "longer than is taken " * 300)
    with serving(tiny_model, ServerSettings(slots=2, queue=64, grace=30)) as served:
        words = ["--url", served.url, "--requests", "20", "--concurrency", "3", "--partials", "1"]
        words += ["--strategy", "vanilla", "-o", str(out), "--prompts", str(tmp_path / "prompts")]
        assert main([*words, "--latency", "30"]) == 0
        assert "at least 3 requests at once" in capsys.readouterr().out
        run = read_run(out)
        assert main([*words, "--latency", "1e-6"]) == 0
        assert "one request at a time is" in capsys.readouterr().out
        assert main([*words, "--latency", "30", "--partials", "2"]) == 2
    assert run.state == "complete" and [one.clients for one in run.loads] == [1, 2, 3]
    assert run.loads == read_run(out).loads  # nothing was measured again
    assert run.settings.prompts.used == ["red heart", "dog face"]
    assert run.settings.weights_hash == served.pipeline.model.weights_hash
    for cell in run.loads:
        counted = [one for one in cell.samples if one.counted]
        assert len(counted) == 20 and {one.outcome for one in counted} == {"ok"}
        assert cell.rate() >= cell.rate(within=cell.latency(0.5)) > 0
        assert 0 < cell.first_partials[0] < cell.latency(0.99)
        for one in counted:
            assert {"waiting", "text", "prefill", "decode", "pixels"} <= one.stages.keys()
            assert sum(one.stages.values()) <= one.seconds + 0.05
        assert not is_measured(cell.joules_per_image)
    check_comparable([run], [str(out)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--requests 19 --latency 1 -o load.json", "needs 20 or more"),
        ("--latency nan", "--latency"),
        ("--latency 0", "--latency"),
        ("--latency 1 -o load.txt", "is not named .json"),
        ("--latency 1 --concurrency 0", "--concurrency"),
        ("--prompts missing", "missing"),
        ("--prompts empty", "holds no prompt"),
        ("-o .", "is a folder"),
    ],
)
def test_what_no_load_can_keep_is_refused_before_a_service_starts(
    tmp_path, capsys, monkeypatch, words, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setattr(service, "run_service", lambda *_: pytest.fail("a service started"))
    assert main([*words.split(), "--serve", "--device cpu"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nope", "", "http://[x", "http://127.0.0.1:1"])
def test_an_address_where_nothing_answers_is_named(url, capsys):
    assert main(["--url", url]) == 2
    assert f"no service answers at {url!r}" in capsys.readouterr().err


def test_a_package_that_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "lantern_accel_profiles.load.__main__")
    with pytest.raises(SystemExit, match=r"httpx is not installed; pip install .*serve"):
        runpy.run_module("lantern_accel_profiles.load", run_name="__main__")


@pytest.mark.long
def test_an_interrupted_search_of_a_service_of_its_own_keeps_its_levels(tiny_model, tmp_path):
    out, prompts = tmp_path / "load.json", tmp_path / "prompts"
    prompts.write_text("red heart\ndog face\n")
    given = f"--model {tiny_model} --device cpu --dtype float32 --slots 2"
    words = [sys.executable, "-m", "lantern_accel_profiles.load", "--serve", given]
    words += ["--latency", "30", "--requests", "20", "--concurrency", "4096"]
    words += ["--strategy", "vanilla", "--prompts", str(prompts), "-o", str(out)]
    search = subprocess.Popen(words)
    while not (out.exists() and read_run(out).loads):
        assert search.poll() is None
        time.sleep(0.1)
    search.send_signal(signal.SIGTERM)  # as Ctrl-C, it ends the service too
    assert search.wait(120) == 130
    run = read_run(out)
    assert run.state == "interrupted" and run.loads[0].clients == 1
    assert is_measured(run.loads[0].others_cpu)
