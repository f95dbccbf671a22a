"""Tiny random Anole and Lumina in their official layouts, through the command, to a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.chameleon import vocabulary, write_anole, write_lumina

import lantern_accel
from lantern_accel.families.base import Model
from lantern_accel.generation.pipeline import Pipeline

CODES = 16


@pytest.fixture(scope="session")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Anole in Hugging Face's layout, 6x6 codes."""
    return write_anole(tmp_path_factory.mktemp("models") / "Anole-7b-v0.1-hf", layout="hf", side=6)


@pytest.fixture(scope="session")
def lumina(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lumina-mGPT-7B-512: pictures of up to 32x32 codes, here of 2x2 pixels."""
    return write_lumina(tmp_path_factory.mktemp("models") / "Lumina-mGPT-7B-512", codes=CODES)


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.mark.parametrize(
    "strategy", ["vanilla", "lantern++", pytest.param("eagle2", marks=pytest.mark.long)]
)
def test_anole_draws_with_every_strategy(command, anole, tmp_path, strategy):
    done = command(
        "generate", "a red fox", "--model", anole, "--strategy", strategy, "--seed", 1,
        "-o", tmp_path / "fox.png", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert size_of(tmp_path / "fox.png") == (12, 12)
    stats = json.loads(done.stdout)
    assert stats["tokens"] == 36
    assert stats["strategy"]["name"] == strategy
    assert stats["sampling"]["cfg_scale"] == 3.0


def test_lumina_draws_pictures_that_are_not_square(command, lumina, tmp_path):
    done = command(
        "generate", "a red fox", "--model", lumina, "--strategy", "vanilla", "--size", "16x8",
        "-o", tmp_path / "fox.png", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert size_of(tmp_path / "fox.png") == (16, 8)
    assert json.loads(done.stdout)["tokens"] == 4 * 9  # newlines included


def greedy_codes(pipe: Pipeline, prompt: str, size: tuple[int, int]) -> list[int]:
    """Decode by dense forwards from the token ids that the official code would start from."""
    model: Model = pipe.model
    target, lumina = model.target, model.manifest.variant == "lumina"
    columns, rows = size
    words = "Generate an image of 16x8 8x8 according to the following prompt: a red fox"
    names = vocabulary(CODES, words if lumina else "a red fox on the moon", lumina=lumina)
    start, turn = names["<racm3:break>"], names["<reserved08706>"]
    if lumina:
        text = f"Generate an image of {2 * columns}x{2 * rows} according to the following prompt:"
        sizes = [names[f"<reserved{8800 + n // 2:05d}>"] for n in (rows, columns)]
        full = [0, *(names[w] for w in [*text.split(), *prompt.split()]), turn, start, *sizes]
        free, scale = [start, *sizes], 4.0
    else:
        full = [0, *(names[w] for w in prompt.split()), turn, start]
        free, scale = [0, start], 3.0
    codes: list[int] = []
    for n in range(rows * (columns + lumina)):
        known = torch.tensor([codes], dtype=torch.int64)
        cond, uncond = (
            target.head(target.forward_dense(torch.tensor([ids]), known)[:, -1])[0]
            for ids in (full, free)
        )
        # Without a picture in the prompt the middle branch is the last, so its weight cancels.
        logits = uncond + scale * (cond - uncond)
        if lumina:
            if (n + 1) % (columns + 1) == 0:
                codes.append(CODES)
                continue
            logits[CODES] = float("-inf")
        codes.append(int(logits.argmax()))
    return codes


@pytest.mark.parametrize(
    "three", [None, pytest.param(1.2, marks=pytest.mark.long)], ids=["two-way", "three-way"]
)
def test_anoles_tokens_are_those_of_dense_forwards(anole, three):
    with lantern_accel.load(anole, device="cpu", dtype="float32") as pipe:
        done = pipe.generate(
            ["a red fox", "the moon"], strategy="vanilla", temperature=0, cfg_scale_image=three,
            batch_size=2,
        )  # fmt: skip
        for tokens, prompt in zip(done.tokens, ("a red fox", "the moon"), strict=True):
            assert tokens.tolist() == greedy_codes(pipe, prompt, (6, 6))
        for name in ("eagle", "scd"):
            drafted = pipe.generate(
                ["a red fox", "the moon"], strategy=name, temperature=0, cfg_scale_image=three
            )
            assert torch.equal(drafted.tokens, done.tokens), name


def test_luminas_tokens_are_those_of_dense_forwards(lumina):
    with lantern_accel.load(lumina, device="cpu", dtype="float32") as pipe:
        for size in ((16, 8), (8, 8)):
            done = pipe.generate("a red fox", strategy="vanilla", temperature=0, size=size)
            expected = greedy_codes(pipe, "a red fox", (size[0] // 2, size[1] // 2))
            assert done.tokens[0].tolist() == expected
            assert done.images[0].size == size
        with pytest.raises(lantern_accel.RequestError, match="two-way guidance"):
            pipe.generate("a red fox", strategy="vanilla", size=(8, 8), cfg_scale_image=1.2)


def test_a_prompt_that_leaves_no_room_for_the_picture_is_refused(anole):
    with (
        lantern_accel.load(anole, device="cpu") as pipe,
        pytest.raises(lantern_accel.RequestError, match=r"trained on 4096 in all; shorten"),
    ):
        pipe.conditions(["fox " * 4100])
