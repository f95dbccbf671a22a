"""A long cache through the pipeline: one recording a bucket, made at once, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.capture import Replay
from lantern_accel.generation import engines


class Recorded(Replay):
    """Counts its calls."""

    captured, kind = True, "recorded"
    calls = 0

    def __call__(self) -> None:
        super().__call__()
        self.calls += 1


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine have the buckets of a longer image."""

    def build(*args: Any, **kwargs: Any) -> Engine:
        engine = Engine(*args, **kwargs)
        engine.divide([128, 192])
        return engine

    monkeypatch.setattr(engines, "Engine", build)


@pytest.mark.parametrize("strategy", ["vanilla", pytest.param("lantern++", marks=pytest.mark.long)])
def test_every_bucket_is_captured_at_once_and_used(
    strategy: str, parted: None, tmp_path: Path
) -> None:
    """Windows of auto, and steps that come alone: tests/unit/decoding/test_buckets.py."""
    model = write_tiny_model(tmp_path / "tiny", grid=15)
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipeline:
        made: dict[str, Recorded] = {}

        def capture(step: Any, name: str = "step") -> Replay:
            made[name] = Recorded(step)
            return made[name]

        # A spy on the real method, for this pipeline alone.
        pipeline.backend.capture = capture  # type: ignore[method-assign]
        ready = pipeline.engine(1, pipeline.strategy(strategy), pipeline.sampling())
        pipeline.generate("red heart", strategy=strategy, seed=4)
        assert list(made) == ["prefill", "step within 128", "step within 192", "step"]
        assert all(one.calls for one in made.values())
        assert [one.kind for one in ready.replays] == ["recorded"] * 3
        pipeline.release_engines()
        assert all(one._step is None for one in made.values())


def test_a_small_model_has_one() -> None:
    with lantern_accel.load(device="cpu", dtype="float32", options={"native": "off"}) as pipeline:
        ready = pipeline.engine(1, pipeline.strategy("lantern++"), pipeline.sampling())
        assert len(ready.replays) == len(ready.engine.sizes) == 1
