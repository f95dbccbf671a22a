"""What is said while drafts are timed, and of what auto chose."""

from __future__ import annotations

import logging
import time

from support.models import write_tiny_model

import lantern_accel
from lantern_accel.cli.console import print_log
from lantern_accel.device import waiting
from lantern_accel.generation import measurements
from lantern_accel.generation.decision import describe_auto
from lantern_accel.strategy.values import NoTree, Strategy, Window


def test_what_takes_long_says_so_again_and_how_long_it_took(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "EVERY", 0.02)
    with print_log(quiet=False), waiting.waiting("measuring", logging.getLogger("lantern_accel.x")):
        time.sleep(0.1)
    first, *again, last = capsys.readouterr().err.splitlines()
    assert first == "measuring" and "so far" in again[0] and "done in" in last
    with print_log(quiet=True), waiting.waiting("measuring", logging.getLogger("lantern_accel.x")):
        pass
    assert not capsys.readouterr().err


def test_auto_says_what_was_counted_and_predicts_nothing():
    windows = Strategy(drafts=Window.over((1, 2, 4)))
    assert describe_auto(windows, 1, "; 90 forward passes, not 255").endswith("passes, not 255")
    assert "no drafts were faster" in describe_auto(Strategy(name="auto", drafts=NoTree()))


def test_the_first_timing_is_in_the_figures_with_a_busy_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(measurements.HostLoad, "share", lambda self: 0.75)
    model = write_tiny_model(tmp_path / "tiny")
    with lantern_accel.load(model, device="cpu") as pipeline:
        stats = pipeline.generate("red heart", seed=1).stats
        assert stats.seconds.measuring > 0
        assert "busy machine; the next images measure again" in stats.auto
        named = pipeline.generate("red heart", seed=1, strategy="vanilla").stats
    assert named.seconds.measuring == 0 and named.auto is None
    assert "predicted" not in stats.auto
