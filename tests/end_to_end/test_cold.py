"""A device that compiles for minutes: the first image waits for few graphs, and says how many."""

from __future__ import annotations

import pytest
import torch
from support.preferring import prefer

import lantern_accel
from lantern_accel.device.backend import Backend, Support
from lantern_accel.device.capture import Replay
from lantern_accel.errors import NotCapturableError
from lantern_accel.files import cache_dir


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
    monkeypatch.setattr(NativeCpu, "support", lambda self, what: Support(True))
    prefer(monkeypatch, NativeCpu, compiles=True)
    return seen


def load(model):
    return lantern_accel.load(model, device="cpu", dtype="float32")


def test_the_first_image_waits_for_plain_decoding_and_one_length(tiny_model, captures, caplog):
    """They are announced, and timed in the same request: later ones capture nothing."""
    with load(tiny_model) as pipeline, caplog.at_level("INFO", logger="lantern_accel.generation"):
        pipeline.generate("red heart", seed=3, temperature=0.0)
        ready = next(one for one in pipeline.engines.ready if len(one.engine.lengths) > 1)
        plain, length = ready.engine.lengths
        assert plain == 1 and captures[:4] == [
            "prefill",
            "step 1",
            f"step {length}",
            f"widen {length}",
        ]
        assert list((cache_dir() / "choices").glob("*.json"))
        seen = len(captures)
        pipeline.generate("red heart", seed=4, temperature=0.0)
        assert len(captures) == seen
        # Who names a length gets it.
        pipeline.generate("red heart", seed=3, strategy="scd", window=2)
        assert len(captures) > seen
    told = [one.getMessage() for one in caplog.records if "graphs" in one.getMessage()]
    assert told[0] == "compiling 3 graphs, once"
    assert [": prefill after" in told[1], ": step 1 after" in told[2]] == [True, True]
    assert "done in" in told[5]


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
    with load(tiny_model) as pipeline:
        with pytest.warns(
            UserWarning, match=r"step \d+.* cannot be captured on cpu: .*no kernel"
        ) as told:
            first = pipeline.generate("red heart", seed=3, temperature=0.0)
        assert len([one for one in told if "captured" in str(one.message)]) == 1
        again = pipeline.generate("red heart", seed=3, temperature=0.0)
    assert torch.equal(first.tokens, again.tokens)
