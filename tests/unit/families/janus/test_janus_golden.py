"""Janus through ``lantern_accel.load``, in both layouts, against deepseek-ai's own program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden import ROOT, golden
from support.janus import write_janus

import lantern_accel
from lantern_accel.families.janus.text import prompt_text
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import Sampling

LAYOUTS = ("original", "hf")


@pytest.fixture(scope="module", params=LAYOUTS)
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_janus(tmp_path_factory.mktemp("Janus-Pro-1B"), request.param)
    with lantern_accel.load(folder, device="cpu", dtype="float32") as one:
        yield one


def decoded(pipeline: Pipeline, ids: list[list[int]], strategy: str, **sampling: Any) -> list[Any]:
    """Return the tokens of prompts that are ids already."""
    family, model = pipeline.model.family, pipeline.model
    given = family.conditions_of(model, ids, torch.device("cpu"))  # type: ignore[attr-defined]
    chosen = pipeline.sampling(**sampling)
    ready = pipeline.engine(len(ids), pipeline.strategy(strategy), chosen, given.shape)
    rows = family.rows(model, given, chosen)
    with torch.inference_mode():
        start = ready.engine.randomness(0, list(range(len(ids))))
        ready.engine.start(rows.condition, rows.mask, start)
        return ready.engine.run().tokens.tolist()


def test_the_aligner_is_folded_into_one_table(pipeline: Pipeline) -> None:
    table = pipeline.model.target.image_table
    assert torch.allclose(table, golden("janus/io")["gen_table"], atol=1e-5)


def test_the_row_without_a_prompt_and_the_logits(pipeline: Pipeline) -> None:
    io, model = golden("janus/io"), pipeline.model
    for name in ("p0", "p1"):
        ids = io[f"{name}.ids"].tolist()
        given = model.family.conditions_of(model, [ids], torch.device("cpu"))  # type: ignore[attr-defined]
        rows = model.family.rows(model, given, Sampling(cfg_scale=5.0))
        seen = rows.mask[0]
        assert torch.equal(rows.condition[:, seen], io[f"{name}.rows"].long())
        codes = io[f"{name}.greedy"].long().expand(2, -1)
        mask = rows.mask.expand(2, -1)
        with torch.inference_mode():
            states = model.target.forward_dense(rows.condition, codes[:, :-1], mask)
            logits = model.target.head(states[:, rows.mask.shape[1] - 1 :])
        want = io[f"{name}.step_logits"].transpose(0, 1)
        assert (logits - want).abs().max() < 1e-4


@pytest.mark.parametrize("strategy", ["vanilla", "scd", "sjd"])
def test_greedy_tokens_of_every_strategy(pipeline: Pipeline, strategy: str) -> None:
    io = golden("janus/io")
    ids = [io[f"{name}.ids"].tolist() for name in ("p0", "p1")]
    both = decoded(pipeline, ids, strategy, temperature=0)
    assert both == [io[f"{name}.greedy"].tolist() for name in ("p0", "p1")]
    alone = decoded(pipeline, ids[:1], strategy, temperature=0, cfg_scale=1.0)
    assert alone == [io["p0.greedy_cfg1"].tolist()]


def test_pixels_and_codes(pipeline: Pipeline) -> None:
    io, model = golden("janus/io"), pipeline.model
    codes = io["vq.codes"].long()
    with torch.inference_mode():
        assert torch.equal(pipeline.pixels(codes), io["vq.pixels_uint8_hwc"])
        drawn = model.vq.decode(codes.view(-1, 6, 6))
        assert (drawn - io["vq.pixels"]).abs().max() < 1e-4
        assert torch.equal(model.vq.encode(io["vq.image"]), io["vq.image_codes"].long())


@pytest.mark.parametrize("variant", ["pro", "1.3b"])
def test_prompts_are_the_official_ones(variant: Any) -> None:
    said = json.loads((ROOT / "janus" / "prompts.json").read_text("utf-8"))
    name = {"pro": "janus_pro", "1.3b": "janus_1_3b"}[variant]
    for prompt in said["prompts"]:
        assert prompt_text(prompt["text"], variant) == prompt[name]


def test_a_text_of_the_other_generation_becomes_an_image(tmp_path: Path) -> None:
    folder = write_janus(tmp_path / "Janus-1.3B", "hf")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        assert pipe.model.manifest.variant == "1.3b"
        ids = pipe.model.text.prompts([" two cats,\nasleep "])
        assert ids[0][0] == 118 and ids[0][-1] == 121 and 118 not in ids[0][1:]
        (image,) = pipe.generate("a red cube", strategy="sjd", seed=2).images
        assert image.size == (12, 12)
