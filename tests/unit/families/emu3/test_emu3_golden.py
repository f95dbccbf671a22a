"""Emu3 and Emu3.5 through ``lantern_accel.load``, in every layout, against the official programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.emu3 import said, write_emu3
from support.golden import check_pixels, golden
from torch import Tensor

import lantern_accel
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.rows import Guidance
from lantern_accel.families.emu3.model import grid_of
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.nn.vq import chameleon_pixels_to_uint8
from lantern_accel.strategy.values import Sampling

PROMPTS = {one["key"]: one for one in said("prompts")["prompts"]}


@pytest.fixture(scope="module", params=["official", "hf"])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_emu3(tmp_path_factory.mktemp("Emu3-Gen"), request.param)
    with lantern_accel.load(folder, device="cpu", dtype="float32") as one:
        yield one


@pytest.fixture(scope="module")
def emu3p5(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_emu3(tmp_path_factory.mktemp("Emu3.5-Image"), "3.5")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as one:
        yield one


def asked(pipeline: Pipeline, key: str) -> dict[str, Any]:
    """Return a recorded request as ``generate`` takes it."""
    one, side = PROMPTS[key], pipeline.model.manifest.token_pixels
    return {
        "prompt": one["text"] + one["suffix"],
        "negative_prompt": one["negative"],
        "size": (one["width"] * side, one["height"] * side),
    }


def logits_after(target: Any, prompts: list[Tensor], written: Tensor, codes: Tensor) -> Tensor:
    """Return logits ``[N, rows, V]`` of what follows each prompt and the codes before."""
    out = []
    with torch.inference_mode():
        for ids in prompts:
            states = target.forward_dense(ids[None].long(), codes[None, : len(written) - 1])
            out.append(target.head(states[0, len(ids) - 1 :]))
    return torch.stack(out, dim=1)


def in_columns(logits: Tensor, target: Any, first: int) -> Tensor:
    """Return recorded logits of the ids from ``first`` on in the order of our codes."""
    return logits[..., torch.tensor(target.token_ids()) - first]


def test_prompts_and_negative_texts(pipeline: Pipeline) -> None:
    io, text = golden("emu3/io"), pipeline.model.text
    for key, one in PROMPTS.items():
        for name, given in (
            ("ids", one["text"] + one["suffix"]),
            ("negative_ids", one["negative"]),
        ):
            ids = text.ids([given], one["height"], one["width"])  # type: ignore[union-attr]  # it has a text
            assert ids == [io[f"{key}.{name}"].tolist()]
    assert grid_of(PROMPTS["p0.s1"]["ratio"], 96, 2) == (7, 4)


def test_logits_of_every_step(pipeline: Pipeline) -> None:
    io, model = golden("emu3/io"), pipeline.model
    target, config = model.target, model.manifest.target
    codes_of = {one: code for code, one in enumerate(config.token_ids())}
    for key in PROMPTS:
        for name in ("greedy", "forced"):
            if f"{key}.{name}" not in io:
                continue
            written = io[f"{key}.{name}"].tolist()[:-3]
            codes = torch.tensor([codes_of[one] for one in written])
            prompts = [io[f"{key}.ids"], io[f"{key}.negative_ids"]]
            found = logits_after(target, prompts, codes, codes)
            kind = "step_logits" if name == "greedy" else "forced_logits"
            want = in_columns(io[f"{key}.{kind}"][: len(written)], config, 483)
            assert (found - want).abs().max() < 1e-4


@pytest.mark.parametrize("strategy", ["vanilla", "scd", "self"])
def test_greedy_tokens_of_every_strategy(pipeline: Pipeline, strategy: str) -> None:
    io, manifest = golden("emu3/io"), pipeline.model.manifest
    for key in ("p0.s0", "p1.s1"):
        drawn = pipeline.generate(**asked(pipeline, key), temperature=0, strategy=strategy, seed=1)
        assert manifest.ids_of(drawn.tokens).tolist() == [io[f"{key}.greedy"].tolist()]
    drawn = pipeline.generate(
        **{**asked(pipeline, "p0.s0"), "negative_prompt": None},
        temperature=0, cfg_scale=1.0, strategy=strategy,
    )  # fmt: skip
    assert manifest.ids_of(drawn.tokens).tolist() == [io["p0.s0.greedy_unguided"].tolist()]


def test_prompts_of_two_lengths_are_drawn_as_alone(pipeline: Pipeline) -> None:
    io, manifest = golden("emu3/io"), pipeline.model.manifest
    given = asked(pipeline, "p0.s0")
    texts = [given.pop("prompt"), PROMPTS["p1.s0"]["text"]]
    drawn = pipeline.generate(texts, **given, temperature=0, strategy="vanilla")
    assert torch.equal(manifest.ids_of(drawn.tokens), io["batch.greedy"].long())


def test_the_law_of_a_token(pipeline: Pipeline) -> None:
    io, target = golden("emu3/io"), pipeline.model.target.resize(height=3, width=4)
    logits = in_columns(io["law.logits"], target.config, 0)
    offsets = io["law.offsets"].long() - 1
    inside = offsets < target.config.num_tokens
    for scale in (1.0, 3.0):
        rows = logits[:, :2].transpose(0, 1) if scale > 1 else logits[:, :1].transpose(0, 1)
        scales = torch.full((target.config.num_tokens,), scale) if scale > 1 else None
        guide = Guidance(scales, None, target.allowed_codes())
        for t, k, p in ((1.0, 0, 1.0), (1.0, 12, 1.0), (0.8, 0, 0.7)):
            given = Sampling(temperature=t, top_k=k, top_p=p, cfg_scale=scale)
            for at in torch.nonzero(inside).flatten().tolist():
                one = guide(rows[:, at : at + 1, None], offsets[at : at + 1])
                found = distribution(one, given).flatten()
                want = io[f"law.probs.cfg{scale:g}_t{t:g}_k{k}_p{p:g}"][at]
                assert (found - in_columns(want, target.config, 483)).abs().max() < 1e-5


def test_pixels_and_codes(pipeline: Pipeline) -> None:
    io, model = golden("emu3/io"), pipeline.model
    for key, grid in (("vq.s0", (5, 5)), ("vq.s1", (7, 4))):
        codes = io[f"{key}.codes"].long()
        with torch.inference_mode():
            whole = pipeline.pixels(model.family.tokens(model, codes), (64, *grid))
            drawn = model.vq.decode(codes)
        want = io[f"{key}.pixels_uint8_hwc"]
        assert torch.equal(chameleon_pixels_to_uint8(io[f"{key}.pixels"]), want)
        check_pixels(whole, want, (io[f"{key}.pixels"].permute(0, 2, 3, 1) + 1) * 127.5)
        assert (drawn - io[f"{key}.pixels"]).abs().max() < 1e-4
    with torch.inference_mode():
        assert torch.equal(model.vq.encode(io["vq.image"]), io["vq.image_codes"].long())


def test_sizes_of_ratios_at_both_areas() -> None:
    for area, known in said("sizes").items():
        for ratio, grid in known.items():
            assert grid_of(ratio, int(area)) == tuple(grid)


def test_emu3p5(emu3p5: Pipeline) -> None:
    io, model = golden("emu3/io_3p5"), emu3p5.model
    manifest, side = model.manifest, model.manifest.token_pixels
    for i, one in enumerate(said("prompts_3p5")["prompts"]):
        high, wide = one["height"], one["width"]
        (ids,) = model.text.ids([one["text"]], high, wide)  # type: ignore[union-attr]  # it has a text
        given = io[f"p{i}.ids"].tolist()
        greedy = io[f"p{i}.greedy"].tolist()
        assert ids == [*given, *greedy[:4]]
        size = (wide * side, high * side)
        made = emu3p5.conditions([one["text"]], size)
        rows = model.family.rows(model, made, Sampling(cfg_scale=5.0))
        other = rows.condition[1][rows.mask[1]].tolist()
        assert other == [*io[f"p{i}.uncond_ids"].tolist(), *greedy[:4]]
        codes_of = {one: code for code, one in enumerate(manifest.target.token_ids())}
        codes = torch.tensor([codes_of[one] for one in greedy[4:-1]])
        prompts = [torch.tensor(ids), torch.tensor(other)]
        found = logits_after(model.target, prompts, torch.tensor(greedy[4:]), codes)
        want = in_columns(io[f"p{i}.step_logits"][4:], manifest.target, 483)
        assert (found - want).abs().max() < 1e-4
        for strategy in ("vanilla", "scd", "self"):
            drawn = emu3p5.generate(one["text"], size=size, temperature=0, strategy=strategy)
            assert manifest.ids_of(drawn.tokens).tolist() == [greedy[4:]]
            assert drawn.images[0].size == size
