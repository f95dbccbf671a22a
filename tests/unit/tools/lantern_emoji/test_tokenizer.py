"""The tokenizer's trainer, on a few coloured squares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import DataError
from lantern_accel.nn.vq import VQConfig, VQModel
from lantern_accel.training.device import TrainDevice
from lantern_emoji.augment import augment, flip, place, rotate_hue, to_float, to_uint8
from lantern_emoji.averages import CodebookAverage
from lantern_emoji.data import EmojiDataset, Record
from lantern_emoji.encode import encode_dataset
from lantern_emoji.folder import load_tokenizer
from lantern_emoji.tokenizer import TokenizerConfig, TokenizerReport
from lantern_emoji.tokenizer import train_tokenizer as train_on

TINY = VQConfig(
    ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=16, codebook_dim=4
)  # type: ignore[call-arg,unused-ignore]


def squares(count: int = 8) -> EmojiDataset:
    """Images 16x16: a coloured square left of the middle, on white."""
    rng = np.random.default_rng(0)
    images = np.full((count, 16, 16, 3), 255, np.uint8)
    for image in images:
        image[4:12, 2:8] = rng.integers(0, 255, 3)
    records = [
        Record(
            index=i, style="noto", concept=f"square {i}", tags=(), group="symbols",
            subgroup="geometric", hexcode=str(i), weight=1.0, flippable=i % 2 == 0,
            split="heldout" if i == 0 else "train",
        )
        for i in range(count)
    ]  # fmt: skip
    return EmojiDataset(images, records)


def train_tokenizer(config: TokenizerConfig, out: Path) -> TokenizerReport:
    return train_on(config, squares(), out, TrainDevice(open_backend("cpu"), "float32"))


def config(**changes: object) -> TokenizerConfig:
    values = {"steps": 4, "batch_size": 4, "warmup": 1, "checkpoint_every": 2, "vq": TINY}
    return TokenizerConfig.model_validate({**values, **changes})


@pytest.mark.long
def test_training_learns(tmp_path: Path) -> None:
    short = train_tokenizer(config(steps=2), tmp_path / "a")
    longer = train_tokenizer(config(steps=20, lr=3e-3, checkpoint_every=20), tmp_path / "b")
    assert longer.mean_psnr > short.mean_psnr + 1.0
    assert (longer.steps, longer.images_seen) == (20, 80)
    assert json.loads((tmp_path / "b" / "report.json").read_text())["psnr"] == longer.psnr
    assert {path.name for path in (tmp_path / "b" / "samples").iterdir()} == {"step-20.png"}
    assert {w.dtype for w in load_file(tmp_path / "b" / "vq.safetensors").values()} == {
        torch.bfloat16
    }
    assert load_tokenizer(tmp_path / "b").config == TINY


def test_views_of_the_dataset() -> None:
    torch.manual_seed(0)
    model, made = VQModel(TINY).eval(), squares()
    tokens = encode_dataset(model, made, views=4, batch=3)
    assert tokens.shape == (8, 4, 64)
    assert tokens.dtype == np.int16
    assert np.array_equal(tokens, encode_dataset(model, made, views=4, batch=3))
    plain = model.encode(to_float(torch.from_numpy(made.images))).flatten(1)
    mirrored = model.encode(to_float(torch.from_numpy(made.images)).flip(-1)).flatten(1)
    assert np.array_equal(tokens[:, 0], plain.numpy())
    assert np.array_equal(tokens[0, 1], mirrored[0].numpy())
    assert np.array_equal(tokens[1, 1], plain[1].numpy())
    assert encode_dataset(model, made, views=1).shape == (8, 1, 64)
    with pytest.raises(DataError, match="no images"):
        encode_dataset(model, EmojiDataset(made.images[:0], []))


def test_the_codebook_moves_to_its_latents_and_restarts_dead_codes() -> None:
    model = VQModel(TINY)
    model.quantize.embedding.weight.requires_grad_(False)
    average = CodebookAverage(model, decay=0.5, dead_below=0.2)
    generator = torch.Generator().manual_seed(0)
    latents = torch.nn.functional.normalize(torch.randn(64, 4, generator=generator), dim=-1)
    average.start(latents, generator)
    restarted = 0
    for _ in range(12):
        codes = (latents @ model.codebook().t()).argmax(-1)
        before = (latents * model.codebook()[codes]).sum(-1).mean()
        restarted += average.update(latents, codes, generator)
    assert before > 0.8
    norms = model.quantize.embedding.weight.norm(dim=-1)
    assert torch.allclose(norms, torch.ones(16), atol=1e-5)
    average.counts[3] = 0.0
    assert average.update(latents, torch.zeros(64, dtype=torch.long), generator) >= 1


def test_augmentations_are_exact_where_they_can_be() -> None:
    pixels = to_float(torch.from_numpy(squares(2).images))
    ones, nil = torch.ones(2), torch.zeros(2, 2)
    assert torch.allclose(place(pixels, ones, nil), pixels, atol=1e-5)
    moved = place(pixels, ones, torch.tensor([[3.0, -2.0]] * 2))
    assert torch.allclose(moved[:, :, :-2, 3:], pixels[:, :, 2:, :-3], atol=1e-5)
    assert torch.allclose(moved[:, :, -2:], torch.ones(()), atol=1e-5)
    small = place(pixels, 0.5 * ones, nil)
    assert torch.allclose(small[:, :, :3], torch.ones(()), atol=1e-5)
    assert torch.allclose(rotate_hue(pixels, torch.zeros(2)), pixels, atol=1e-5)
    red = torch.tensor([1.0, -1.0, -1.0]).view(1, 3, 1, 1)
    green = rotate_hue(red, torch.tensor([2 * math.pi / 3]))
    assert green.flatten().tolist() == pytest.approx([-1.0, 1.0, -1.0], abs=1e-5)
    mask = torch.tensor([True, False])
    assert torch.equal(flip(pixels, mask)[0], pixels[0].flip(-1))
    assert torch.equal(flip(pixels, mask)[1], pixels[1])


def test_pixels_survive_the_round_trip_and_stay_in_range() -> None:
    images = torch.from_numpy(squares(4).images)
    assert torch.equal(to_uint8(to_float(images)), images)
    drawn = augment(to_float(images), torch.ones(4, dtype=torch.bool), torch.Generator(), hue=1.0)
    assert drawn.shape == (4, 3, 16, 16)
    assert float(drawn.abs().max()) <= 1.0 + 1e-5
