"""An image goes on from its first tokens, in every family, with the tokens that it would have had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import of_family, request_of, sampling_of
from support.frozen import STRATEGIES, Case
from support.frozen import made as tiny_of

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.registry import family_names
from lantern_accel.generation.forced import resume

NAMES = ("plain", "window", "window that moves", "head", "copy", "copy, windows of its own")

#: Next to the window of every family.
QUICK = {("emu3", "plain"), ("emu3", "window that moves"), ("emu3", "copy")}


def made(family: str, name: str, temperature: float) -> tuple[Any, Any]:
    """Return an engine of two images of a tiny model, and what starts them."""
    model = tiny_of(Case(family, name, not temperature), TensorOps())
    sampling = sampling_of(model, temperature, top_k=16)
    engine = of_family(model, STRATEGIES[name], sampling, 2)
    return engine, request_of(model, engine, [0, 1], seed=5, drawn=7)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "window") for family in family_names()),
        *(
            pytest.param(family, name, marks=() if (family, name) in QUICK else pytest.mark.long)
            for family in family_names()
            for name in NAMES
            if name != "window"
        ),
    ],
)
@torch.inference_mode()
def test_an_image_goes_on_from_its_first_tokens(family: str, name: str) -> None:
    engine, given = made(family, name, 0.9)
    engine.start(*given)
    whole = engine.run()
    total = engine.geometry.tokens
    for known in (1, 2, total // 2, total - 1, total):
        engine.start(*given)
        resume(engine, whole.tokens[:, :known])
        if known == total:
            assert torch.equal(engine.read_tokens().tokens, whole.tokens)
            continue
        again = engine.run(known=known)
        assert torch.equal(again.tokens, whole.tokens), known
        assert int(again.steps.max()) <= total - known
    if name == "plain":
        assert int(again.steps.max()) == 1


@torch.inference_mode()
def test_passes_over_known_tokens_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern_accel.generation.forced.TOKENS", 3)
    engine, given = made("llamagen", "window", 0.0)
    engine.start(*given)
    whole = engine.run()
    engine.start(*given)
    resume(engine, whole.tokens[:, :8])
    assert torch.equal(engine.run(known=8).tokens, whole.tokens)
