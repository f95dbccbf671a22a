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
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Anole in the original layout, 32x32 codes as every Anole has."""
    return write_anole(tmp_path_factory.mktemp("models") / "Anole-7b-v0.1", layout="original")


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


@pytest.mark.parametrize(
    ("size", "reason"),
    [("17x8", "multiples of 4"), ("16", "cannot be read"), ("0x8", "is not possible")],
)
def test_a_size_that_cannot_be_drawn_is_refused(command, lumina, tmp_path, size, reason):
    done = command(
        "generate", "a fox", "--model", lumina, "--strategy", "vanilla", "--size", size,
        "-o", tmp_path / "x.png",
    )  # fmt: skip
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_sizes_and_classes_are_refused(command, anole, tiny_model, tmp_path):
    for model, own in ((anole, "12x12"), (tiny_model, "8x8")):
        done = command(
            "generate", "fox", "--model", model, "--size", "64x32", "-o", tmp_path / "x.png"
        )
        assert done.returncode == 2
        assert f"generates {own} pixels only, not 64x32" in done.stderr
    with (
        lantern_accel.load(anole, device="cpu") as pipe,
        pytest.raises(lantern_accel.RequestError, match="the prompt 3 is a number"),
    ):
        pipe.generate(3)


def greedy_codes(
    pipe: Pipeline, prompt: str, size: tuple[int, int], three: float | None
) -> list[int]:
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
    assert three is None or not lumina
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
            assert tokens.tolist() == greedy_codes(pipe, prompt, (6, 6), three)
        drafted = pipe.generate(
            ["a red fox", "the moon"], strategy="eagle", temperature=0, cfg_scale_image=three
        )
    assert torch.equal(drafted.tokens, done.tokens)


def test_luminas_tokens_are_those_of_dense_forwards(lumina):
    with lantern_accel.load(lumina, device="cpu", dtype="float32") as pipe:
        for size in ((16, 8), (8, 8)):
            done = pipe.generate("a red fox", strategy="vanilla", temperature=0, size=size)
            expected = greedy_codes(pipe, "a red fox", (size[0] // 2, size[1] // 2), None)
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


def test_both_layouts_of_one_model_draw_the_same(tmp_path):
    from support.chameleon import (
        hf_config,
        random_hf_weights,
        tiny_vq,
        write_hf,
        write_original,
        write_text_tokenizer,
        write_vqgan,
    )

    names = vocabulary(CODES, "a red fox on the moon", lumina=False)
    weights = random_hf_weights(31, tokens=len(names))
    write_hf(tmp_path / "hf", weights, hf_config(weights, 4))
    write_original(tmp_path / "original", weights, 4)
    tokens = []
    for name in ("hf", "original"):
        write_text_tokenizer(tmp_path / name / "tokenizer" / "text_tokenizer.json", names)
        write_vqgan(tmp_path / name / "tokenizer" / "vqgan.ckpt", tiny_vq(12, CODES))
        with lantern_accel.load(tmp_path / name, device="cpu", dtype="float32") as pipe:
            model = pipe.model
            ids = torch.randint(0, len(names), (1, 20), generator=torch.Generator().manual_seed(1))
            tokens.append(model.target.head(model.target.forward_dense(ids, ids[:, :0])))
    torch.testing.assert_close(tokens[0], tokens[1], rtol=0.0, atol=1e-4)
