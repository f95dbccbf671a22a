"""Chameleon's trunk, drafter and VQGAN against tensors recorded from the official code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.chameleon import drafter_recipes, fill_from, write_hf, write_text_tokenizer
from support.golden import golden, golden_metadata
from torch.nn import functional as F
from torch.testing import assert_close

import lantern_accel
from lantern_accel.decoding.rows import prefix_positions
from lantern_accel.families.chameleon.model import ChameleonDrafter, ChameleonDrafterConfig
from lantern_accel.families.chameleon.text import image_token_name
from lantern_accel.families.tokenizer import left_pad
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.nn.vq import chameleon_pixels_to_uint8

#: Of all tokens; a model keeps the rows of codes alone.
HEAD = golden("chameleon_hf/weights")["lm_head.weight"]
CLOSE = {"rtol": 0.0, "atol": 1e-4}
IDS = json.loads(golden_metadata("chameleon_hf/io")["ids"])


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """The recorded target, drafter-less, with its VQGAN and vocabulary: a folder like Anole's."""
    folder = tmp_path_factory.mktemp("golden") / "anole"
    said = json.loads(golden_metadata("chameleon_hf/weights")["config"])
    picture = {"vq_config": {"resolution": 64, "ch_mult": [1, 1, 1, 2, 2]}}
    write_hf(folder, golden("chameleon_hf/weights"), {"model_type": "chameleon", **said, **picture})
    torch.save(
        {"state_dict": {**golden("chameleon_vq/weights"), "loss.logvar": torch.zeros(1)}},
        folder / "vqgan.ckpt",
    )
    names = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<image>": IDS["image_placeholder"]}
    names.update({image_token_name(c): IDS["image_first"] + c for c in range(64)})
    names.update({"<eoss>": IDS["eoi"], "<racm3:break>": IDS["boi"]})
    names["<reserved08706>"] = IDS["eot_sep"]
    names.update({f"tok{i}": i for i in range(72, 160)})
    write_text_tokenizer(folder / "text_tokenizer.json", names)
    with lantern_accel.load(folder, device="cpu", dtype="float32") as one:
        yield one


def test_guided_greedy_decoding_gives_the_recorded_tokens(pipe: Pipeline) -> None:
    io, target = golden("chameleon_hf/io"), pipe.model.target
    mask = io["attention_mask"].bool()
    codes = torch.zeros(1, 0, dtype=torch.int64)
    for step in range(16):
        features = target.forward_dense(io["input_ids"], codes.expand(2, -1), mask)[:, -1:]
        assert_close(F.linear(features[:, 0], HEAD), io["step_logits"][:, step], **CLOSE)
        cond, free = target.head(features)[:, 0]
        guided = free + 3.0 * (cond - free)
        recorded = io["cfg3_logits_image_only"][step]
        first = IDS["image_first"]
        assert_close(guided, recorded[first : first + len(guided)], **CLOSE)
        codes = torch.cat((codes, guided.argmax().view(1, 1)), dim=1)
    assert torch.equal(codes + IDS["image_first"], io["greedy_cfg3"])


def test_the_prompt_is_padded_and_placed_as_recorded() -> None:
    io = golden("chameleon_hf/io")
    prompt = [IDS["bos"], *io["prompt_ids"].tolist(), IDS["eot_sep"], IDS["boi"]]
    ids, mask = left_pad([prompt, [IDS["bos"], IDS["boi"]]], 12, IDS["pad"])
    assert torch.equal(ids, io["input_ids"])
    assert torch.equal(mask, io["attention_mask"].bool())
    assert torch.equal(prefix_positions(mask), io["position_ids"])


def test_the_anole_drafter_predicts_the_recorded_features(tmp_path: Path) -> None:
    """Position ``p`` reads the target's state there and the token behind it."""
    said = json.loads(golden_metadata("lantern_drafters/anole_weights")["config"])
    config = ChameleonDrafterConfig(
        dim=said["hidden_size"],
        n_head=said["num_attention_heads"],
        ffn_dim=said["intermediate_size"],
        token_count=said["vocab_size"],
        norm_eps=said["rms_norm_eps"],
        image_codes=64,
    )
    torch.save(golden("lantern_drafters/anole_weights"), tmp_path / "pytorch_model.bin")
    drafter = ChameleonDrafter(config)
    fill_from(tmp_path, drafter, drafter_recipes)
    io = golden("lantern_drafters/anole_io")
    seen = io["attention_mask"].bool()
    condition = F.pad(io["input_ids"], (1, 0))  # its first token is not read
    out = drafter.forward_image(condition, condition[:, :0], io["hidden_states"], seen)
    # Padded rows hold what the official masks let through, which nothing reads.
    assert_close(out[seen], io["out_hidden"][seen], **CLOSE)


def test_the_public_loader_and_pipeline_give_the_recorded_picture(pipe: Pipeline) -> None:
    io, vq_io = golden("chameleon_hf/io"), golden("chameleon_vq/io")
    prompt = " ".join(f"tok{i}" for i in io["prompt_ids"].tolist())
    done = pipe.generate(prompt, strategy="vanilla", temperature=0, cfg_scale=3.0)
    assert torch.equal(done.tokens + IDS["image_first"], io["greedy_cfg3"])
    assert done.images[0].size == (64, 64)
    assert_close(pipe.model.vq.decode(vq_io["codes"]), vq_io["pixels"], **CLOSE)
    drawn = pipe.pixels(vq_io["codes"].flatten(1)).int()
    theirs = vq_io["pixels_uint8_hwc"].int()
    assert (drawn - theirs).abs().max() <= 1
    assert (drawn != theirs).float().mean() < 1e-3
    assert torch.equal(chameleon_pixels_to_uint8(vq_io["pixels"]), vq_io["pixels_uint8_hwc"])


def test_encoding_an_image_gives_the_official_codes(pipe: Pipeline) -> None:
    io, vq = golden("chameleon_vq/io"), pipe.model.vq
    assert_close(vq.encode_latents(io["image"]), io["enc_prequant"], **CLOSE)
    assert torch.equal(vq.encode(io["image"]), io["image_codes"])
    # A picture need not be square.
    assert vq.decode(torch.arange(8).view(1, 2, 4)).shape == (1, 3, 2 * 16, 4 * 16)
    assert vq.encode(io["image"][:, :, :32]).shape == (2, 2, 4)
