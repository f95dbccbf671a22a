"""Emu3's folders: what is read off them, and what is refused in one sentence."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emu3 import RECORDED, ibq_weights, said, weights_of, write_emu3
from support.golden import golden

import lantern_accel
from lantern_accel.errors import CheckpointError, RequestError
from lantern_accel.families.emu3.model import grid_of
from lantern_accel.families.emu3.text import tiktoken_tokenizer
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model, named_parts


@pytest.mark.parametrize("layout", ["official", "hf", "3.5"])
def test_check_says_what_is_there(layout: str, tmp_path: Path) -> None:
    report = check(write_emu3(tmp_path / "x", layout))
    assert report.family == "emu3" and report.usable
    assert {one.part: one.state for one in report.parts} == {
        "target": "found", "vq": "found", "text_tokenizer": "found", "drafter": "missing",
    }  # fmt: skip


def test_the_image_tokenizer_of_emu3p5_is_read_as_it_is_published(tmp_path: Path) -> None:
    folder = write_emu3(tmp_path / "x", "3.5")
    (folder / "vision_tokenizer" / "model.safetensors").unlink()
    trained = {"state_dict": {**ibq_weights(), "loss.scale": torch.ones(1)}, "epoch": 3}
    torch.save(trained, folder / "vision_tokenizer" / "model.ckpt")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        assert pipe.generate("a cat", size=(8, 8), strategy="vanilla").images


def test_a_file_without_an_encoder_draws_and_reads_no_pictures(tmp_path: Path) -> None:
    kept = {
        key: value
        for key, value in weights_of("hf").items()
        if not key.startswith(("vqmodel.encoder.", "vqmodel.quant_conv."))
    }
    io = golden("emu3/io")
    with lantern_accel.load(write_emu3(tmp_path / "x", "hf", weights=kept), device="cpu") as pipe:
        drawn = pipe.model.vq.decode(io["vq.s0.codes"].long())
        assert (drawn - io["vq.s0.pixels"]).abs().max() < 1e-4
        with pytest.raises(lantern_accel.LanternError, match="has no encoder"):
            pipe.model.vq.encode(io["vq.image"])


def test_mixed_layouts(tmp_path: Path) -> None:
    both = {**weights_of("hf"), **{k: v.clone() for k, v in weights_of("official").items()}}
    with pytest.raises(CheckpointError, match="has keys of two layouts"):
        find_model(write_emu3(tmp_path / "both", weights=both))


@pytest.mark.parametrize(
    ("layout", "vision", "message"),
    [
        ("official", ibq_weights, "so it is not Emu3's image tokenizer"),
        ("official", lambda: golden("lumina2/movqgan"), "so it is not Emu3's image tokenizer"),
        ("3.5", lambda: golden("emu3/vision_tokenizer"), "norms that read the codes"),
    ],
)
def test_an_image_tokenizer_of_another_family(
    layout: str, vision: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(write_emu3(tmp_path / "x", layout, vision=vision()))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("official", {"max_position_embeddings": 131072}, "is Emu3-Chat by its max_position"),
        ("official", {"image_area": 262144}, "is Emu3-Stage1 by its image_area"),
        ("official", {"eol_token_id": 482}, "says eol_token_id 482, but by the vocabulary's order"),
        ("official", {"eoi_token_id": 90}, "has no place for Emu3's tokens"),
        ("official", {"num_hidden_layers": 4}, "num_hidden_layers 3 by its shapes"),
        ("official", {"model_type": "Emu3VisionVQ"}, "is the image tokenizer of Emu3 alone"),
        ("official", {"image_area": "large"}, "says image_area 'large', not a number"),
        ("official", {"image_area": -5}, "says image_area -5, not a number"),
        (
            "official",
            {"max_position_embeddings": "9"},
            "says max_position_embeddings '9', not a",
        ),
        ("hf", {"vocabulary_map": [1]}, r"says vocabulary_map \[1\], which has no names"),
        ("hf", {"vq_config": {"temporal_downsample_factor": 0}}, "temporal_downsample_factor 0"),
        ("3.5", {"rms_norm_eps": None}, r"lacks rms_norm_eps, which the weights of Emu3\.5 cannot"),
    ],
)
def test_configurations_that_cannot_be_used(
    layout: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = said({"official": "config", "hf": "hf_config", "3.5": "config_3p5"}[layout])
    with pytest.raises(CheckpointError, match=message):
        find_model(write_emu3(tmp_path / "x", layout, config={**config, **changes}))


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


def test_a_missing_part_of_the_tokenizer(tmp_path: Path) -> None:
    folder = write_emu3(tmp_path / "x")
    (folder / "emu3_vision_tokens.txt").unlink()
    assert "emu3_vision_tokens.txt" in find_model(folder).missing["text"]
    assert not check(folder).usable
    (folder / "emu3.tiktoken").unlink()
    assert "emu3.tiktoken" in find_model(folder).missing["text"]
    found = find_model(folder, named_parts(text_encoder=RECORDED))
    assert found.files["text_tokenizer"] == RECORDED / "emu3.tiktoken"


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    folder = write_emu3(tmp_path / "x")
    names = (folder / "emu3_vision_tokens.txt").read_text("utf-8").splitlines()
    for some, message in ((names[:-1], "names 63 codes"), (names[1:], "does not name")):
        (folder / "emu3_vision_tokens.txt").write_text("\n".join(some), "utf-8")
        with pytest.raises(CheckpointError, match=message):
            find_model(folder)
    words = (folder / "emu3.tiktoken").read_text("utf-8").splitlines()
    for some in (words[:-1], words[1:], ["%% 1"]):
        (folder / "emu3.tiktoken").write_text("\n".join(some), "utf-8")
        with pytest.raises(
            CheckpointError, match=r"lacks words|cannot be read|at \d+, and the model"
        ):
            lantern_accel.load(write_text_back(folder, names), device="cpu")


def write_text_back(folder: Path, names: list[str]) -> Path:
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(names), "utf-8")
    return folder


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


def test_what_a_request_cannot_have(tmp_path: Path) -> None:
    folder = write_emu3(tmp_path / "x")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        for text in ("a <|image token|> b", "<|extra_7|>", "x<|visual token 000001|>"):
            for asked in ({"prompt": text}, {"prompt": "a cat", "negative_prompt": text}):
                with pytest.raises(RequestError, match="reads as a token of its own"):
                    pipe.generate(**asked)  # type: ignore[arg-type]  # of many types
        with pytest.raises(RequestError, match="sides are multiples of 2"):
            pipe.generate("a cat", size=(11, 10))
        with pytest.raises(RequestError, match="with fewer than 512 tokens"):
            pipe.generate("a cat", size=(60, 60))
        with pytest.raises(RequestError, match="shorten the prompt to 482 tokens"):
            pipe.generate("a cat " * 200)
        with pytest.raises(RequestError, match="shorten the prompt to 482 tokens"):
            pipe.generate("a cat", negative_prompt="a cat " * 200)
        with pytest.raises(RequestError, match="two-way guidance"):
            pipe.generate("a cat", cfg_scale_image=1.5)
    for ratio in ("1000000:1", "0:1", "16x9", "-1:2", "1:2:3", "\u0661:1"):
        with pytest.raises(RequestError, match="the ratio"):
            grid_of(ratio, 518400)
