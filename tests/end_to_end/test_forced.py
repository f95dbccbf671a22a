"""What a target says of given tokens: the tokens of an image are those that noise picks from it."""

from __future__ import annotations

import pytest
import torch
from support.chameleon import write_anole, write_lumina
from support.glm_image import write_glm_image
from support.janus import write_janus

import lantern_accel
from lantern_accel.generation.quantized import PLAIN, next_tokens

PROMPTS = ("red heart", "dog face")
WRITTEN = {
    "anole": lambda folder: write_anole(folder / "Anole-7b-v0.1-hf", layout="hf", side=6),
    "lumina": lambda folder: write_lumina(folder / "Lumina-mGPT-7B-512", codes=64),
    "janus": lambda folder: write_janus(folder / "Janus-Pro-1B"),
    "glm_image": lambda folder: write_glm_image(folder / "glm"),
}


QUICK = [("llamagen", "auto"), ("anole", "off"), ("janus", "auto")]
SLOW = [(kind, native) for kind in ("lumina", "glm_image") for native in ("auto", "off")]


@pytest.mark.parametrize(
    ("kind", "native"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in SLOW)]
)
def test_noise_picks_the_tokens_that_were_drawn(kind, native, tiny_model, tmp_path, monkeypatch):
    """By every family's prompts, positions and codes that are not allowed; the last pass overlaps."""
    monkeypatch.setattr("lantern_accel.generation.forced.TOKENS", 7)
    folder = tiny_model if kind == "llamagen" else WRITTEN[kind](tmp_path)
    dtype = "bfloat16" if native == "auto" else "float32"
    with lantern_accel.load(
        folder, device="cpu", dtype=dtype, options={"native": native}
    ) as pipeline:
        sampling = pipeline.sampling()
        done, _ = pipeline.decode_only(list(PROMPTS), PLAIN, sampling, seed=4)
        with pipeline.backend.inference():
            model, given = pipeline.model, pipeline.conditions(list(PROMPTS))
            said = next_tokens(model, pipeline.backend, given, done.tokens, sampling)
            ready = pipeline.engine(2, PLAIN, sampling, given.shape)
            engine = ready.engine
            engine.state.keys.copy_(engine.randomness(4, [0, 1]))
            places = torch.arange(said.shape[1]).expand(2, -1)
            picked = engine.session.choices.of(said, places)
            moved = engine.session.choices.of(said.roll(1, dims=1), places)
    torch.testing.assert_close(said.sum(-1), torch.ones(said.shape[:2]), rtol=1e-5, atol=1e-5)
    assert torch.equal(picked, done.tokens)
    assert not torch.equal(moved, done.tokens)
