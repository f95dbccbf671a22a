"""The load client against a server: what it counts is what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from support.server import serving

from lantern_accel.serving.studio import ServerSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import load


@pytest.mark.parametrize("partials", [0, 3])
def test_every_request_is_answered_with_its_own_picture(tiny_model, tmp_path, partials, capsys):
    with serving(tiny_model, ServerSettings(slots=3, queue=64, grace=30)) as served:
        words = ["--url", served.url, "--requests", "24", "--concurrency", "12", "--cancel", "0.25"]
        words += ["--impossible", "3", "--deaf", "2", "--check", "--strategy", "eagle"]
        words += ["--partials", str(partials), "-o", str(tmp_path / "load.json")]
        (tmp_path / "prompts").write_text("red heart\ndog face\nfish\n")
        assert load.main([*words, "--prompts", str(tmp_path / "prompts")]) == 0
        served.until(lambda: served.studio.state == "ok" and not served.studio.running)
    found = json.loads((tmp_path / "load.json").read_text())
    outcomes = found["outcomes"]
    assert sum(outcomes.values()) == 29 == len(found["samples"])
    assert outcomes["drawn: ok"] == 18 and outcomes["impossible: refused"] == 3
    assert outcomes.get("leaves: left", 0) + outcomes.get("leaves: ok", 0) == 6
    assert outcomes["deaf: ok"] == 2
    assert found["wrong_pictures"] == 0
    assert found["joules_per_image"] is None and found["meter"] is None
    assert found["latency_s"]["p50"] <= found["latency_s"]["p99"] <= found["latency_s"]["max"]
    assert found["goodput_per_s"] == found["images_per_s"] > 0
    assert (found["first_partial_s"] is None) == (partials == 0)
    assert "images/s" in capsys.readouterr().out


def test_another_picture_is_noticed(tiny_model, monkeypatch):
    with serving(tiny_model, ServerSettings(slots=1, grace=30)) as served:
        body, calls = load.Load.body, []

        def other(self, sample, stream):
            calls.append(sample)
            found = body(self, sample, stream)
            return found | {"seed": 99} if len(calls) == 2 else found

        monkeypatch.setattr(load.Load, "body", other)
        words = ["--url", served.url, "--requests", "4", "--concurrency", "1", "--check"]
        assert load.main([*words, "--partials", "0", "--strategy", "vanilla"]) == 1


def test_quantiles_are_values_that_were_seen():
    assert load.quantiles([]) is None
    assert load.quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    hundred = load.quantiles([float(n) for n in range(1, 101)])
    assert hundred == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
