"""Counts that one model recorded are what another's steps bring, place by place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import publish
import pytest
import replayed_counts as tool
import torch
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.errors import RequestError
from lantern_accel.generation import measurements as automatic
from lantern_accel.strategy.length_policy import AcceptancePolicy
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import ChainTree, SelfDrafts, Strategy, Window


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def test_steps_are_found_by_their_place() -> None:
    counts = tool.Counts(tokens=10)
    counts.steps["window", 4, 0, 1] = [[(0, 3), (3, 1), (4, 4)]]
    gains = [counts.gain("window", 4, (0, 1), 0, at / 20) for at in range(20)]
    assert gains == [3] * 6 + [1] * 2 + [4] * 12
    with pytest.raises(RequestError, match="no steps of 2 tokens from a window"):
        counts.gain("window", 2, (0, 1), 0, 0.5)
    by_head = Window.over((1, 2)).model_copy(update={"fresh": "head"})
    assert tool.source_of(by_head) != tool.source_of(Window.over((1, 2))), "other counts"
    with pytest.raises(RequestError, match="the drafter's chains"):
        tool.source_of(ChainTree.over((1, 2)))


def test_another_models_steps_bring_what_was_recorded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    copy = SelfDrafts.over((1, 3, 4), weights="int6", window=2, passes=2)
    named = "copy in int6, 3 drafts, 2 passes of windows of 2"
    with (
        lantern_accel.load(tiny_model, device="cpu", dtype="float32") as small,
        lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline,
    ):
        recorder = tool.Recorder(small, ["red heart", "dog face"], 2, [0, 1])
        counts = recorder.counts
        assert not counts.steps, "nothing is recorded before an engine is made"
        recorder.record(Window.over((1, 2)))
        recorder.record(Window.over((1, 2, 4)))  # a length more
        recorder.record(copy)
        assert set(counts.steps) == {
            (source, length, number, seed)
            for source, lengths in (("window", (2, 4)), (named, (3, 4)))
            for length in lengths
            for number in (0, 1)
            for seed in (0, 1)
        }
        for images in counts.steps.values():
            assert len(images) == 2
            assert all(sum(gain for _, gain in steps) == 15 for steps in images)
        # Every step of drafts brings two tokens, whatever the model itself would accept.
        for key in counts.steps:
            counts.steps[key] = [[(at, 2) for at in range(0, 16, 2)]] * 2
        replay = tool.Replay(pipeline, recorder)
        replay.request = (1, 1)
        strategy = Strategy(name="recorded", drafts=copy)
        sampling = pipeline.sampling()
        engine = pipeline.engine(2, strategy, sampling, pipeline.conditions(["dog face"]).shape)
        engine.engine.chosen = AcceptancePolicy((DraftLength(length=3),))
        done, _ = pipeline.decode_only(["dog face"] * 2, strategy, sampling, 5)
        assert torch.equal(done.steps, torch.tensor([8, 8]))


@pytest.mark.parametrize("conditioning", ["text", "class"])
def test_a_size_is_raced_with_and_without_the_head(
    conditioning: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(automatic.auto, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(publish, "BATCHES", (1,))
    size = tmp_path / "small.json"
    sizes: dict[str, Any] = {
        "dim": 64,
        "n_layer": 2,
        "n_head": 2,
        "ffn_dim": 64,
        "vocab_size": 64,
        "grid": 4,
    }
    if conditioning == "class":
        sizes |= {"conditioning": "class", "prefix_length": 1, "num_classes": 10}
    size.write_text(json.dumps(sizes))
    given = SimpleNamespace(prompts={"composed": ["red heart"]}, seeds=(1,))
    rows = list(publish.run_size(given, str(tiny_model), str(size)))
    assert [(row["strategy"], row["head"]) for row in rows] == list(publish.STRATEGIES[:3])
    assert all(row["seconds"][0] > 0 and row["prompt"] == "red heart" for row in rows)
    assert not list((tmp_path / "cache/choices").glob("*.json")), "replayed counts choose nothing"
