"""Lumina-mGPT 2.0 through ``lantern_accel.load`` against tensors recorded from the official code."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.chi_square import misfit
from support.golden import ROOT, check_pixels, golden
from support.lumina2 import write_lumina2
from torch import Tensor
from torch.testing import assert_close

import lantern_accel
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.rows import Guidance
from lantern_accel.errors import RequestError
from lantern_accel.families.lumina2.model import Lumina2Config, Lumina2GPT
from lantern_accel.nn.vq import nearest_uint8
from lantern_accel.strategy.values import Sampling

SAID = json.loads((ROOT / "lumina2" / "prompts.json").read_text("utf-8"))
FIRST, NEWLINE = SAID["ids"]["code_0"], SAID["ids"]["newline"]
TEXTS = [SAID["prompts"][0]["text"], SAID["prompts"][2]["text"]]
#: The two sizes, in pixels of the recorded decoder: one unit of the grid, and two next to each other.
SIZES = {"s0": (8, 8), "s1": (16, 8)}
#: Tokens of both: a row end has the code 64, and the image end, which is not drawn, is left out.
COUNTS = {"s0": 20, "s1": 36}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_lumina2(tmp_path_factory.mktemp("golden") / "Lumina-mGPT-2.0")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as one:
        yield one


def codes_of(ids: Tensor, size: str) -> Tensor:
    ids = ids[: COUNTS[size]].long()
    return torch.where(ids == NEWLINE, 64, ids - FIRST)


@pytest.mark.parametrize("size", list(SIZES))
def test_prompt_ids_and_the_row_without_a_prompt(pipe: Any, size: str) -> None:
    io, model = golden("lumina2/io"), pipe.model
    given = model.family.conditions(model, TEXTS, torch.device("cpu"), torch.float32, SIZES[size])
    rows = model.family.rows(model, given, Sampling(cfg_scale=4.0))
    for n in range(2):
        start = io[f"p{n}.{size}.start_ids"].tolist()
        assert rows.condition[n][rows.mask[n]].tolist() == start
        assert rows.condition[2 + n][rows.mask[2 + n]].tolist() == start[-3:]


@pytest.mark.parametrize("key", ["p0.s0", "p0.s1", "p1.s0", "p1.s1"])
def test_logits_of_both_rows(pipe: Any, key: str) -> None:
    io, target = golden("lumina2/io"), pipe.model.target
    start, size = io[f"{key}.start_ids"].long(), key[3:]
    for drawn, logits in (("greedy_cfg4", "step_logits"), ("forced", "forced_logits")):
        if f"{key}.{drawn}" not in io:
            continue
        codes = codes_of(io[f"{key}.{drawn}"], size).unsqueeze(0)
        for row, prompt in enumerate((start, start[-3:])):
            with torch.inference_mode():
                states = target.forward_dense(prompt.unsqueeze(0), codes)
                found = target.head(states[0, len(prompt) - 1 : -1])
            want = io[f"{key}.{logits}"][: COUNTS[size], row]
            assert_close(found[:, :64], want[:, :64], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("strategy", ["vanilla", "scd", "self"])
@pytest.mark.parametrize(("size", "scale"), [("s0", 4.0), ("s0", 7.0), ("s1", 7.0), ("s1", 1.0)])
def test_greedy_tokens_of_every_strategy(pipe: Any, strategy: str, size: str, scale: float) -> None:
    """At 7 the scale falls along the picture, which changes tokens."""
    io = golden("lumina2/io")
    found = pipe.generate(
        TEXTS, size=SIZES[size], strategy=strategy, temperature=0, cfg_scale=scale
    )
    want = [codes_of(io[f"p{n}.{size}.greedy_cfg{scale:g}"], size) for n in range(2)]
    assert found.tokens.tolist() == [one.tolist() for one in want]


def test_the_scale_of_guidance_falls_as_the_official_one() -> None:
    io = golden("lumina2/io")
    for key in (key for key in io if key.startswith("guidance.")):
        high, wide, cfg = (
            key.removeprefix("guidance.h").replace("_w", " ").replace("_cfg", " ").split()
        )
        config = Lumina2Config(
            dim=8, n_layer=1, n_head=1, ffn_dim=8, token_count=8, image_first=0, image_codes=4,
            newline_id=5, height=4 * int(high), width=4 * int(wide), prefix_length=2,
        )  # fmt: skip
        with torch.device("meta"):
            target = Lumina2GPT(config)
        if float(cfg) < 4:  # the official code takes 4; here it is refused
            with pytest.raises(RequestError, match="below 4"):
                target.guidance_scales(float(cfg))
            continue
        scales = target.guidance_scales(float(cfg))
        count = min(96, len(scales))
        found = torch.tensor(scales[:count], dtype=torch.float64)
        assert_close(found, io[key][:count], rtol=0.0, atol=1e-9)


def test_the_law_of_a_token(pipe: Any) -> None:
    """Guidance with the position's scale, the grammar, top-k of the codes, temperature."""
    io = golden("lumina2/io")
    target = pipe.model.target.resize(height=4, width=4)
    ids = torch.tensor(target.config.token_ids())
    at = io["law.tokens_before"].long()
    inside = at < target.config.num_tokens  # the image end behind the last row is not drawn
    logits = io["law.logits"][inside][:, :, ids].transpose(0, 1)
    for key in (key for key in io if key.startswith("law.probs.")):
        scale, top_k, heat = (
            float(one.lstrip("cfgkt")) for one in key.removeprefix("law.probs.").split("_")
        )
        # The recorded processor was a new one at each position: its scale has fallen once.
        once = 1 - (at[inside] + 2) / 4
        scales = torch.ones(target.config.num_tokens)
        scales[at[inside]] = (scale * once).clamp(min=4.0).float() if scale > 1 else 1.0
        guided = Guidance(scales if scale > 1 else None, None, target.allowed_codes())
        rows = logits if scale > 1 else logits[:1]
        found = torch.cat(
            [guided(rows[:, n].unsqueeze(1), at[n].view(1)) for n in range(int(inside.sum()))]
        )
        sampling = Sampling(cfg_scale=scale, top_k=int(top_k), temperature=heat)
        want = io[key][inside][:, ids - 303]
        assert_close(distribution(found, sampling).squeeze(1), want, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("size", list(SIZES))
def test_pixels_are_the_recorded_ones_rounded_to_the_nearest(pipe: Any, size: str) -> None:
    io, model = golden("lumina2/io"), pipe.model
    codes, want = io[f"vq.{size}.codes"].long(), io[f"vq.{size}.pixels_uint8_hwc"]
    recorded = io[f"vq.{size}.pixels"]
    assert torch.equal(nearest_uint8(recorded), want)
    with torch.inference_mode():
        assert_close(model.vq.decode(codes), recorded, rtol=0.0, atol=1e-4)
        shape = (64, *codes.shape[1:])
        found = model.family.pixels(model, model.family.tokens(model, codes), shape)
    check_pixels(found, want, (recorded.permute(0, 2, 3, 1) + 1) * 127.5 + 0.5)


def test_encoding_an_image_gives_the_official_codes(pipe: Any) -> None:
    io, vq = golden("lumina2/io"), pipe.model.vq
    assert_close(vq.encode_latents(io["vq.image"]), io["vq.enc_prequant"], rtol=0.0, atol=1e-4)
    assert torch.equal(vq.encode(io["vq.image"]), io["vq.image_codes"])


def test_halves_and_what_is_out_of_range() -> None:
    rounded = {-1.5: 0, -1: 0, 0: 128, 1 / 255: 128, 2 / 255: 128, 3 / 255: 129, 1: 255, 9: 255}
    pixels = torch.tensor(list(rounded), dtype=torch.float64).view(1, 1, 1, -1)
    assert nearest_uint8(pixels).flatten().tolist() == list(rounded.values())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["scd"])
def test_sampled_tokens_follow_the_law_under_the_grammar(pipe: Any, strategy: str) -> None:
    """The joint law of the first three tokens, each guided with its own scale."""
    io, target, top_k = golden("lumina2/io"), pipe.model.target, 3
    start = io["p0.s0.start_ids"].long()
    scales = target.resize(height=4, width=4).guidance_scales(7.0)
    law, past = torch.ones(1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.int64)
    for scale in scales[:3]:
        rows = []
        for prompt in (start, start[-3:]):
            with torch.inference_mode():
                states = target.forward_dense(prompt.expand(len(past), -1), past)
                rows.append(target.head(states[:, -1])[:, :64])
        guided = rows[1] + scale * (rows[0] - rows[1])
        each, codes = distribution(guided, Sampling(top_k=top_k)).topk(top_k)
        law = (law.unsqueeze(1) * each.double()).flatten()
        past = torch.cat((past.repeat_interleave(top_k, 0), codes.reshape(-1, 1)), dim=1)
    options = {"size": SIZES["s0"], "strategy": strategy, "cfg_scale": 7.0, "top_k": top_k}
    tokens = pipe.generate(TEXTS[0], **options, num_images=600, batch_size=24, seed=4).tokens
    assert (tokens[:, 4::5] == 64).all() and (tokens.view(-1, 4, 5)[:, :, :4] < 64).all()
    seen = (tokens[:, None, :3] == past).all(-1)
    assert seen.any(1).all()  # nothing else is possible
    assert misfit(seen.sum(0), law) < 4
