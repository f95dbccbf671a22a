"""A long cache through the pipeline: one recording a bucket, made at once, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.capture import Replay
from lantern_accel.generation import engines


class Recorded(Replay):
    """Counts its calls, and holds memory."""

    captured, kind, nbytes, seconds = True, "recorded", 10, 0.5
    calls = 0

    def __call__(self) -> None:
        super().__call__()
        self.calls += 1

    def timed(self) -> dict[str, float] | None:
        self()
        return {"verify": 1.0}


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine have the buckets of a longer image."""

    def build(*args: Any, **kwargs: Any) -> Engine:
        engine = Engine(*args, **kwargs)
        engine.divide([128, 192])
        return engine

    monkeypatch.setattr(engines, "Engine", build)


@pytest.mark.parametrize(
    "strategy",
    ["vanilla", *(pytest.param(s, marks=pytest.mark.long) for s in ("lantern++", "auto"))],
)
def test_every_bucket_is_captured_at_once_and_used(
    strategy: str, parted: None, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny", grid=15)
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipeline:
        made: dict[str, Recorded] = {}
        every: list[tuple[str, Recorded]] = []  # several sources' steps may have one name

        def capture(step: Any, name: str = "step") -> Replay:
            made[name] = Recorded(step)
            every.append((name, made[name]))
            return made[name]

        # A spy on the real method, for this pipeline alone.
        pipeline.backend.capture = capture  # type: ignore[method-assign]
        chosen, sampling = pipeline.strategy(strategy), pipeline.sampling()
        ready = pipeline.engine(1, chosen, sampling)
        before = set(made)
        drawn = pipeline.generate("red heart", strategy=strategy, seed=4)
        # auto may have timed chains too, all of which are captured before it draws.
        assert before <= set(made) and (strategy == "auto" or set(made) == before)
        *some, _ = ready.engine.sizes
        if strategy == "auto":
            # The engine of auto: its longest length, which is measured, says how many buckets there are.
            assert some in ([128], [128, 192]) and len(made) > 2 * len(ready.engine.lengths)  # type: ignore[attr-defined]  # an engine with lengths
            # Which source its drafts come from is measured, and nothing here depends on it.
            assert any(one.calls for name, one in every if name.endswith(" within 128"))
        else:
            assert list(made) == ["prefill", "step within 128", "step within 192", "step"]
            assert all(one.calls for one in made.values())
            assert [one.kind for one in ready.replays] == ["recorded"] * 3
            # A step that came alone looks at the whole cache, and draws the same.
            count = made["step within 128"].calls
            alone, _ = pipeline.decode_only(
                ["red heart"], chosen, sampling, 4, step=ready.engine.step
            )
            assert (
                torch.equal(alone.tokens, drawn.tokens) and made["step within 128"].calls == count
            )
        pipeline.release_engines()
        assert all(one._step is None for _, one in every)


def test_a_small_model_has_one() -> None:
    with lantern_accel.load(device="cpu", dtype="float32", options={"native": "off"}) as pipeline:
        ready = pipeline.engine(1, pipeline.strategy("lantern++"), pipeline.sampling())
        assert len(ready.replays) == len(ready.engine.sizes) == 1
