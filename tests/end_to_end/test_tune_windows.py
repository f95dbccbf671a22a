"""Tuning windows: what is tried, that the fastest is kept for its batch, and that generate uses it."""

from __future__ import annotations

import json

import pytest

import lantern_accel
from lantern_accel.errors import DoesNotFitError, StrategyError
from lantern_accel.strategy.choices import choices_dir
from lantern_accel.strategy.values import Window
from lantern_accel.tuning import search
from lantern_accel.tuning import windows as tuning


def test_what_is_tried(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        plain = tuning.windows(pipe.strategy("scd"), 16)
        assert [w.length for w in plain] == [3, 4, 6, 8, 12, 16], "none is longer than the image"
        assert [tuning.words(one) for one in tuning.windows(pipe.strategy("scd"), 4)] == [
            "window:3", "window:4"
        ]  # fmt: skip
        with pytest.raises(StrategyError, match="'eagle' has no window to tune"):
            tuning.WindowTuner(pipe, pipe.strategy("eagle"), prompts=["dog face"])


def test_the_fastest_window_is_kept_and_used(command, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "LENGTHS", (2, 4))
    words = ("--model", tiny_model, "--strategy", "scd", "--batch", 1, "--batch", 2)
    done = command("tune", *words, "--repeats", 1, "-o", tmp_path / "evidence.json")
    assert done.returncode == 0, done.stderr
    assert "batch 2" in done.stdout and "x plain decoding" in done.stdout
    kept = json.loads((tmp_path / "evidence.json").read_text())["choices"]
    assert [one["key"]["batch"] for one in kept] == [1, 2]
    assert all(one["key"]["strategy"] == "scd" and one["key"]["temperature"] == 1 for one in kept)
    for one in kept:
        speeds = {
            m["strategy"]["drafts"].get("length"): m["tokens_per_second"] for m in one["measured"]
        }
        plain = speeds.pop(None)
        best = max(speeds, key=lambda length: speeds[length])
        assert one["strategy"]["drafts"]["length"] == best
        assert one["speedup"] == pytest.approx(speeds[best] / plain)
    assert not list(choices_dir().glob("*.partial"))
    lengths = [one["strategy"]["drafts"]["length"] for one in kept]
    with lantern_accel.load(tiny_model, device="cpu") as pipe:

        def length(**settings):
            settings = {"strategy": "scd", **settings}
            return pipe.request(["dog face"] * 2, **settings).strategy.drafts.length

        assert [length(batch_size=1), length(batch_size=2)] == lengths
        # A length that was asked for stays; another temperature or strategy was not tuned.
        assert length(window=5) == 5 and length(tree="window:7") == 7
        # What costs of rows favour; the tests' are those of vectors.
        assert length(temperature=0) == length(strategy="sjd") == 8


def test_a_window_that_does_not_fit_is_left_out_and_a_run_goes_on(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "LENGTHS", (2, 3, 4))
    monkeypatch.setattr(tuning, "HOPELESS", 0.0)  # a slow moment of the machine ends no row here
    sound, said = search.take_sample, []

    def small(pipeline, cell, *args, **more):
        if isinstance(cell.strategy.drafts, Window) and cell.strategy.drafts.length > 3:
            raise DoesNotFitError("too large")
        if len(said) == 2:
            said.append("stopped")
            raise KeyboardInterrupt
        return sound(pipeline, cell, *args, **more)

    monkeypatch.setattr(search, "take_sample", small)
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        scd = pipe.strategy("scd")
        again = {"prompts": ["dog face"], "say": said.append}
        with pytest.raises(KeyboardInterrupt):
            tuning.WindowTuner(pipe, scd, **again).run(repeats=1)
        (choice,) = tuning.WindowTuner(pipe, scd, **again).run(repeats=1)
    assert sum("vanilla" in line for line in said) == 1, "measured once, although it was stopped"
    assert any("window:4 is left out: too large" in line for line in said)
    assert {m.strategy.drafts.length for m in choice.measured[1:]} == {2, 3}
