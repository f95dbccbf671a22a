"""GLM-Image's prior through ``lantern_accel.load``, against transformers' own class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.glm_image import RECORDED, write_glm_image
from support.golden import golden

import lantern_accel
from lantern_accel.families.glm_image.grids import grids, large_codes, positions, prior_token_ids
from lantern_accel.families.glm_image.model import GlmImageConfig
from lantern_accel.families.glm_image.text import prompt_text
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.nn.rotary import rotary_table

PROMPTS = json.loads((RECORDED / "prompts.json").read_text("utf-8"))["prompts"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = write_glm_image(tmp_path_factory.mktemp("glm") / "GLM-Image")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as one:
        yield one


def greedy(pipeline: Pipeline, texts: list[str], size: tuple[int, int], strategy: str) -> Any:
    with pytest.warns(UserWarning, match="there are no images"):
        done = pipeline.generate(texts, size=size, strategy=strategy, temperature=0, seed=1)
    assert done.images == []
    return done.tokens


@pytest.mark.parametrize("index", [0, 1])
def test_prompts_and_positions(pipeline: Pipeline, index: int) -> None:
    said, io = PROMPTS[index], golden("glm_image/io")
    manifest: Any = pipeline.model.manifest
    rows, columns = said["large_grid"]
    assert manifest.grid((said["width"], said["height"])) == (rows, columns)
    assert grids(rows, columns)[0] == tuple(said["small_grid"])
    assert prompt_text(said["text"], manifest.ids, rows, columns) == said["rendered"]
    text: Any = pipeline.model.text
    ids = text.prompts([said["text"]], rows, columns)
    assert ids == io[f"p{index}.input_ids"].tolist()
    made = positions(len(ids[0]), grids(rows, columns))
    assert torch.equal(made[:, :-1], io[f"p{index}.position_ids"].long())
    assert torch.equal(made[:, len(ids[0]) :], io[f"p{index}.decode_position_ids"].long())


@pytest.mark.parametrize("index", [0, 1])
def test_logits(pipeline: Pipeline, index: int) -> None:
    said, io, target = PROMPTS[index], golden("glm_image/io"), pipeline.model.target
    ids = io[f"p{index}.input_ids"].long()
    rows, columns = said["large_grid"]
    # Once as it is, once left-padded as requests are: all positions are then 39 or 33 further.
    for length in (ids.shape[1], 64):
        fitted = target.resize(prefix_length=length, height=rows, width=columns)
        pads = length - ids.shape[1]
        condition = torch.nn.functional.pad(ids, (pads, 0), value=129)
        mask = torch.arange(length).view(1, -1) >= pads
        with torch.inference_mode():
            codes = io[f"p{index}.forced"].long().view(1, -1)
            states = fitted.forward_dense(condition, codes, mask)
            logits = fitted.head(states[0, length - 1 :])
        want = io[f"p{index}.forced_logits"]
        # The last row is of the end marker, which we never draw.
        assert (logits[: len(want) - 1] - want[:-1, : logits.shape[-1]]).abs().max() < 1e-4


@pytest.mark.parametrize("strategy", ["vanilla", pytest.param("scd", marks=pytest.mark.long)])
def test_greedy_tokens(pipeline: Pipeline, strategy: str) -> None:
    io = golden("glm_image/io")
    for index, said in enumerate(PROMPTS):
        tokens = greedy(pipeline, [said["text"]], (said["width"], said["height"]), strategy)
        assert tokens[0].tolist() == io[f"p{index}.greedy"][:-1].tolist()
        rows, columns = said["large_grid"]
        large = large_codes(tokens, rows, columns).flatten()
        assert torch.equal(large, io[f"p{index}.large_tokens"].long())
        ids = prior_token_ids(tokens, rows, columns)
        assert torch.equal(ids, io[f"p{index}.prior_token_ids"].long())
    both = greedy(pipeline, [said["text"] for said in PROMPTS], (256, 256), strategy)
    assert torch.equal(both, io["batch.greedy"][:, :-1].long())


@pytest.mark.parametrize(
    ("key", "changes"),
    [("t0.9_k144_p0.75", {}), ("t1.3_k20_p0.9", {"temperature": 1.3, "top_k": 20, "top_p": 0.9})],
)
def test_the_law_of_a_token(pipeline: Pipeline, key: str, changes: dict[str, Any]) -> None:
    from lantern_accel.decoding.logits import Filters, distribution
    from lantern_accel.decoding.state import RuntimeParams

    io = golden("glm_image/io")
    strategy, sampling = pipeline.strategy("vanilla"), pipeline.sampling(**changes)
    if not changes:
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.9, 0.75, 0)
    runtime_params = RuntimeParams(strategy, sampling, 1, torch.device("cpu"), lambda scale: None)
    filters = Filters(sampling, runtime_params.temperature, runtime_params.top_p)
    for name in ("p0", "p1"):
        logits = io[f"{name}.forced_logits"][io[f"{name}.probs_rows"].long(), :128]
        made = distribution(logits, filters)
        want = io[f"{name}.probs.{key}"]
        plain = want[:, 128:].eq(0).all(dim=1)  # no special id in the nucleus: the laws are one
        assert plain.sum() > len(plain) // 2
        made = made / made.sum(-1, keepdim=True)
        assert (made - want[:, :128])[plain].abs().max() < 1e-5


def test_the_table_of_real_sizes() -> None:
    real = golden("glm_image/real_sizes")
    for rows in range(1, 65):
        for columns in range(1, 65):
            assert grids(rows, columns)[0] == tuple(real["small_grid"][rows, columns].tolist())
    for name, want in real.items():
        if name.startswith("positions."):
            high, wide = (int(side) // 32 for side in name.partition(".")[2].split("x"))
            assert torch.equal(positions(20, grids(high, wide)), want.long()), name
    c = GlmImageConfig(height=36, width=24)
    places = positions(20, c.grids)[:, real["rope.rows_of_1152x768"].long()]
    cos, sin = rotary_table(
        places, c.head_dim, c.rope_base, torch.device("cpu"), rotated=c.rotated, sections=c.sections
    )
    assert torch.allclose(cos[:, :32], real["rope.cos"][:, :32], atol=1e-5)
    assert torch.allclose(sin[:, :32], real["rope.sin"][:, :32], atol=1e-5)
    assert cos[:, 32:].eq(1).all() and sin[:, 32:].eq(0).all()


def test_rows_of_two_widths() -> None:
    config = GlmImageConfig(height=3, width=4, small_tokens=8)
    assert config.grids == ((2, 3), (3, 4))
    assert config.above == [-1, -1, -1, 0, 1, 2, -1, -1, -1, -1, *range(6, 14)]
