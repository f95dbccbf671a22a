"""A device that compiles for minutes: the first image waits for plain decoding's steps, and no other."""

from __future__ import annotations

import pytest
import torch
from support.preferring import prefer

import lantern_accel
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend
from lantern_accel.device.capture import Replay
from lantern_accel.errors import NotCapturableError
from lantern_accel.strategy.values import Window


class Recorded(Replay):
    captured = True
    kind = "recorded"


@pytest.fixture
def captures(monkeypatch, tmp_path):
    """Let the CPU record steps, slowly; return the names of what it recorded."""
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    from lantern_accel_cpu.native.backend import NativeCpu

    seen: list[str] = []

    def capture(self: Backend, step, name="step"):
        seen.append(name)
        step()
        return Recorded(step)

    monkeypatch.setattr(NativeCpu, "capture", capture)
    prefer(monkeypatch, NativeCpu, capture_patience=0.0)
    return seen


def load(model):
    return lantern_accel.load(model, device="cpu", dtype="float32")


def windows_of(pipeline) -> Engine:
    """Return the engine of auto's windows; beside it may be one that was timed, or chosen."""
    found = (ready.engine for ready in pipeline.engines.ready)
    return next(
        engine
        for engine in found
        if len(engine.lengths) > 1 and isinstance(engine.strategy.drafts, Window)
    )


def test_the_first_image_is_drawn_plainly_and_every_request_adds_a_length(tiny_model, captures):
    with load(tiny_model) as pipeline:
        rounds, usable, texts = [], [], []
        for _ in range(6):
            captures.clear()
            texts.append(pipeline.generate("red heart", seed=3, temperature=0.0).stats.auto)
            rounds.append(list(captures))
            one = windows_of(pipeline)
            usable.append(None if one.usable is None else sorted(one.usable))
    lengths = sorted(one.by_length)
    assert rounds[0] == ["prefill", "step 1"]
    assert usable[0] == [1]
    longest = lengths[-1]
    assert rounds[1] == [f"step {longest}", f"widen {longest}"]
    assert usable[1] == [1, longest]
    every = {name for names in rounds for name in names}
    assert {f"step {n}" for n in lengths} <= every
    assert usable[-1] is None


def pipeline_choices():
    from lantern_accel.files import cache_dir

    return cache_dir() / "choices"


def test_nothing_is_chosen_before_all_lengths_are_there(tiny_model, captures):
    requests = 0
    with load(tiny_model) as pipeline:
        while not (kept := list(pipeline_choices().glob("*.json"))) and requests < 12:
            pipeline.generate("red heart", seed=3, temperature=0.0)
            requests += 1
        assert kept
        assert windows_of(pipeline).usable is None
    assert requests > 2, "a length is captured with every request"


def test_warming_up_captures_all_at_once(tiny_model, captures):
    with load(tiny_model) as pipeline:
        pipeline.warm_up((1,), ("auto",), temperature=0.0)
        (ready,) = pipeline.engines.ready
        assert ready.engine.usable is None
        lengths = ready.engine.lengths
    widened = [f"widen {length}" for length in lengths[1:]]
    every = ["prefill", *(f"step {length}" for length in lengths), *widened]
    assert sorted(captures) == sorted(every)


def test_a_capture_that_fails_in_the_middle_leaves_a_pipeline_that_draws_with_one_line(
    tiny_model, captures, monkeypatch
):
    from lantern_accel_cpu.native.backend import NativeCpu

    sound = NativeCpu.capture

    def capture(self, step, name="step"):
        if name.startswith("step") and name != "step 1":
            captures.append(name)
            raise NotCapturableError(f"the {name} cannot be captured: no kernel")
        return sound(self, step, name)

    monkeypatch.setattr(NativeCpu, "capture", capture)
    prefer(monkeypatch, NativeCpu, capture_patience=1e9)
    with load(tiny_model) as pipeline:
        with pytest.warns(
            UserWarning, match=r"the step cannot be captured on cpu .*no kernel"
        ) as told:
            first = pipeline.generate("red heart", seed=3, temperature=0.0)
        assert len([one for one in told if "captured" in str(one.message)]) == 1
        again = pipeline.generate("red heart", seed=3, temperature=0.0)
    assert torch.equal(first.tokens, again.tokens)
