"""A text encoder stays where it fits beside decoding, and goes where its memory is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.device.backend import MemoryUse


class Encoder:
    """A text source that holds memory until it is released."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.held = inner, False

    def encode(self, prompts: Any) -> Any:
        self.held = True
        return self.inner.encode(prompts)

    def release(self) -> None:
        self.held = False


@pytest.mark.parametrize(
    ("free", "stays"), [(40 * 2**30, True), (2**30, False), (None, False)], ids=str
)
def test_it_stays_where_the_rest_fits_beside_it(
    free: int | None, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lantern_accel.load(write_tiny_model(tmp_path / "tiny"), device="cpu") as pipeline:
        use = MemoryUse(in_use=0, free=free)
        monkeypatch.setattr(pipeline.backend, "memory", lambda: use)
        text = Encoder(pipeline.model.text)
        pipeline.model.text = text
        pipeline.generate(["red heart"], strategy="vanilla", seed=1)
        assert text.held is stays


def test_it_goes_before_an_engine_that_needs_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lantern_accel.load(write_tiny_model(tmp_path / "tiny"), device="cpu") as pipeline:
        text = Encoder(pipeline.model.text)
        text.held = True
        pipeline.model.text = text
        monkeypatch.setattr(
            pipeline.backend,
            "memory",
            lambda: MemoryUse(in_use=0, free=1 if text.held else 40 * 2**30),
        )
        monkeypatch.setattr(pipeline.engines.capacity, "keeps_text", lambda images: True)
        assert pipeline.generate(["red heart"], strategy="vanilla", seed=1).images
        assert not text.held
