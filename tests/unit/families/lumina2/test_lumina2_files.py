"""The files of Lumina-mGPT 2.0: what they are recognised by, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chameleon import write_lumina
from support.golden import golden
from support.lumina2 import write_lumina2

from lantern_accel.errors import RequestError
from lantern_accel.families.base import Parts
from lantern_accel.families.lumina2.text import (
    Lumina2Ids,
    first_token,
    ids_from_vocabulary,
    instructions,
)
from lantern_accel.families.registry import entry, family, known_as
from lantern_accel.families.tokenizer import read_vocabulary
from lantern_accel.models.locate import find_model
from lantern_accel.strategy.values import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lumina2(tmp_path_factory.mktemp("hub") / "models--Alpha-VLLM--Lumina-mGPT-2.0")


def test_the_vocabulary_says_which_chameleon_it_is(folder: Path, tmp_path: Path) -> None:
    assert find_model(folder).manifest.family == "lumina2"
    first = write_lumina(tmp_path / "Lumina-mGPT-7B-512")
    assert find_model(first).manifest.family == "chameleon"


def test_the_decoder_is_read_as_safetensors_too(tmp_path: Path) -> None:
    path = write_lumina2(tmp_path / "m", ckpt=False)
    assert find_model(path).files["vq"].name == "movqgan.safetensors"


@pytest.mark.parametrize("named", ["movqgan", "movqgan/270M", "movqgan/270M/movqgan_270M.ckpt"])
def test_the_decoder_may_be_named_by_any_folder_of_it(named: str, folder: Path) -> None:
    found = find_model(folder, Parts(vq=folder / named))
    assert found.files["vq"].name == "movqgan_270M.ckpt"


def test_ids_are_read_by_name_and_bos_is_the_tokenizers_or_else_eos(folder: Path) -> None:
    known = read_vocabulary(folder / "tokenizer.json", "")
    ids = ids_from_vocabulary(known, "<|im_end|>")
    assert (ids.bos, ids.image_start, ids.newline, ids.end_of_turn) == (282, 302, 307, 314)
    assert (ids.image_first, ids.image_codes, ids.grids) == (315, 64, tuple(range(308, 314)))
    assert first_token({"bos_token": {"content": "<b>"}, "eos_token": "<e>"}) == "<b>"
    assert first_token({"bos_token": None, "eos_token": "<e>"}) == "<e>"
    elsewhere = {**known, "<reserved08801>": 5}  # size tokens need not be one after the other
    assert ids_from_vocabulary(elsewhere, "<|im_end|>").grids[:3] == (308, 5, 310)
    released = Lumina2Ids()
    assert (released.image_first, released.newline, released.grids[0]) == (155000, 151670, 151671)


def test_released_sizes() -> None:
    kind = family("lumina2")
    manifest: Any = kind.from_entry(entry("lumina-mgpt-2"))
    assert manifest.target.num_tokens == 9312 and kind.image_size(manifest) == (768, 768)
    assert manifest.grid((512, 1024)) == (128, 64)
    assert known_as("Alpha-VLLM/Lumina-mGPT-2.0-Omni") == "lumina-mgpt-2-omni"
    assert manifest.defaults.sampling == Sampling(cfg_scale=4.0, top_k=4096)


def test_two_panels_and_the_size_in_words() -> None:
    text = "Generate a dual-panel image of 512x1024 where the <lower half> displays a <depth map>: a cat"
    assert instructions([text], 128, 64) == [text]
    assert instructions(["a cat"], 64, 128)[0].startswith("Generate an image of 1024x512 according")


def test_a_size_without_a_token_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="no size token"):
        find_model(folder).manifest.model_copy(update={"side": 96}).grid((8 * 6, 8 * 6))


def test_two_panels_have_the_recorded_prompt(folder: Path) -> None:
    said = json.loads((folder / "config.json").read_text("utf-8"))
    assert said["model_type"] == "chameleon"
    found = find_model(folder)
    text = family("lumina2").text(found, torch.device("cpu"), torch.float32)
    assert text is not None
    want = golden("lumina2/io")["dual.pair_ids"].tolist()
    decoded = text.tokenizer.decode(want[1:-1])  # type: ignore[attr-defined]  # a Lumina2Text
    size = decoded.split(" ")[5]
    wide, high = (int(side) // 8 for side in size.split("x"))
    assert text.prompts([decoded], high, wide)[0][: len(want)] == want  # type: ignore[attr-defined]  # a Lumina2Text
