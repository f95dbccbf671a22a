"""Emu3's folders: what is read off them, and what is refused in one sentence."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
from support.emu3 import RECORDED, ibq_weights, said, weights_of, write_emu3

import lantern_accel
from lantern_accel.errors import CheckpointError, RequestError
from lantern_accel.families.emu3.model import grid_of
from lantern_accel.families.emu3.text import tiktoken_tokenizer
from lantern_accel.models.locate import find_model, known_manifest
from lantern_accel.nn.vq import VQModel


def test_the_image_tokenizer_of_emu3p5_is_read_as_it_is_published(tmp_path: Path) -> None:
    folder = write_emu3(tmp_path / "x", "3.5")
    (folder / "vision_tokenizer" / "model.safetensors").unlink()
    trained = {"state_dict": {**ibq_weights(), "loss.scale": torch.ones(1)}, "epoch": 3}
    torch.save(trained, folder / "vision_tokenizer" / "model.ckpt")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        assert pipe.generate("a cat", size=(8, 8), strategy="vanilla").images
        vq, latents = pipe.model.vq, torch.randn(1, 8, 2, 3)
    # The code of the largest dot product, which is not always the nearest.
    found = vq.nearest_code(latents)
    scores = vq.quantize.embedding.weight @ latents[0].flatten(1)
    assert torch.equal(found.flatten(), scores.argmax(dim=0))
    assert not torch.equal(found, VQModel.nearest_code(vq, latents))


@pytest.mark.parametrize("name", ["emu3-gen", "emu3.5-image"])
def test_a_manifest_is_read_as_it_was_written(name: str) -> None:
    made = known_manifest(name)
    assert made is not None and type(made).model_validate_json(made.model_dump_json()) == made


def test_a_configuration_that_leaves_its_base_out_has_the_released_one(tmp_path: Path) -> None:
    config = said("hf_config")
    config["text_config"]["rope_parameters"] = {"rope_type": "default"}
    assert (
        find_model(write_emu3(tmp_path / "x", "hf", config=config)).manifest.target.rope_base == 1e6
    )


@pytest.mark.parametrize("layout", ["official", "hf", "3.5"])
def test_a_head_that_is_the_embedding(layout: str, tmp_path: Path) -> None:
    name = {"official": "config", "hf": "hf_config", "3.5": "config_3p5"}[layout]
    config, kept = said(name), dict(weights_of(layout))
    head = next(key for key in kept if key.endswith("lm_head.weight"))
    table = next(value for key, value in kept.items() if key.endswith("embed_tokens.weight"))
    del kept[head]
    config.get("text_config", config)["tie_word_embeddings"] = True
    folder = write_emu3(tmp_path / "tied", layout, weights=kept, config=config)
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        target = pipe.model.target
        ids, one = torch.tensor(target.config.token_ids()), torch.eye(target.config.dim)
        torch.testing.assert_close(target.head(one), table[ids].float().t())
    with pytest.raises(CheckpointError, match=r"output\.weight"):
        apart = write_emu3(tmp_path / "apart", layout, weights=kept, config=said(name))
        lantern_accel.load(apart, device="cpu")


def test_the_reader_of_tiktoken_merges_the_lowest_id_first(tmp_path: Path) -> None:
    more = ["bc", "ab", "abcd", " \u00e9", "123"]
    words = [bytes([byte]) for byte in range(256)] + [one.encode() for one in more]
    lines = [f"{base64.b64encode(word).decode()} {i}" for i, word in enumerate(words)]
    path = tmp_path / "emu3.tiktoken"
    path.write_text("\n".join(lines), "utf-8")
    (tmp_path / "emu3_vision_tokens.txt").write_bytes(
        (RECORDED / "emu3_vision_tokens.txt").read_bytes()
    )
    made = tiktoken_tokenizer(path)
    for text, ids in (
        ("abc", [97, 256]),  # "bc" comes before "ab"
        ("abcd", [258]),  # a word, whatever pairs are
        ("e\u0301 e\u0301", [195, 169, 259]),
        ("123", [49, 50, 51]),  # digits stand alone
        ("<|image start|>5", [256 + 5 + 209, 53]),
    ):
        assert made.encode(text).ids == ids


@pytest.mark.parametrize("ratio", ["1000000:1", "0:1", "16x9", "-1:2", "1:2:3", "\u0661:1"])
def test_what_is_not_a_ratio(ratio: str) -> None:
    with pytest.raises(RequestError, match="the ratio"):
        grid_of(ratio, 518400)
