"""Warming up makes all engines ready; what was not warmed up is served, and said."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import lantern_accel
from lantern_accel.errors import LanternWarning, RequestError


def test_warmed_buckets_are_reused_and_another_is_told(tiny_model: Path) -> None:
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        captured: list[str] = []
        real = pipeline.backend.capture
        pipeline.backend.capture = lambda step, name: captured.append(name) or real(step, name)
        pipeline.warm_up((1, 2), ("vanilla",))
        assert captured == ["prefill", "step"] * 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.generate(["red heart", "pizza"], strategy="vanilla", batch_size=2, seed=1)
        assert captured == ["prefill", "step"] * 2
        says = r"bucket \(vanilla x 3, .* compiled now; warm are: vanilla x 1, vanilla x 2"
        with pytest.warns(LanternWarning, match=says):
            pipeline.engine(3, pipeline.strategy("vanilla"), pipeline.sampling())
        with pytest.raises(
            RequestError, match="3 batch sizes of 2 strategies are more buckets than"
        ):
            pipeline.warm_up((1, 2, 3), ("vanilla", "eagle"))


def test_a_text_encoder_is_read_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        text, read = pipeline.model.text, list[object]()
        encode = text.encode
        monkeypatch.setattr(text, "encode", lambda given: read.append(given) or encode(given))
        pipeline.warm_up(1, "vanilla")
    assert read


def test_one_size_and_one_strategy_need_no_list(tiny_model: Path) -> None:
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        pipeline.warm_up(2, "vanilla")
        pipeline.warm_up(2, pipeline.strategy("vanilla"))
        assert pipeline.engines.warmed == ["vanilla x 2"]
        with pytest.raises(RequestError, match="batch_size takes"):
            pipeline.warm_up("3x")  # type: ignore[arg-type]  # text is refused
        with pytest.raises(RequestError, match="batch_size takes"):
            pipeline.warm_up(2.5)  # type: ignore[arg-type]  # so is a fraction
