"""The MoVQ tokenizers of Lumina-mGPT 2.0 and Emu3 against tensors recorded from the official code."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from support.golden import golden
from torch.testing import assert_close

from lantern_accel.checkpoints.loading import Recipe, fill, without_data
from lantern_accel.checkpoints.weights import Checkpoint, HeldFile
from lantern_accel.errors import CheckpointError
from lantern_accel.families.image_tokenizer import movq_sizes, tokenizer_names, vq_sizes
from lantern_accel.nn.movq import MoVQ, MoVQConfig
from lantern_accel.nn.vq import chameleon_pixels_to_uint8, nearest_uint8

CLOSE = {"rtol": 0.0, "atol": 1e-4}
FILES = {"lumina2": "lumina2/movqgan", "emu3": "emu3/vision_tokenizer"}
both = pytest.mark.parametrize("name", list(FILES))


def opened(name: str) -> Checkpoint:
    return Checkpoint(Path(name), [HeldFile(Path(name), golden(FILES[name]))])


@functools.cache
def official(name: str) -> MoVQ:
    """The recorded tokenizer, read as a file of official names is."""
    checkpoint = opened(name)
    names = tokenizer_names(checkpoint)
    model = MoVQ(movq_sizes(checkpoint, names, name))
    recipes = {ours: Recipe((key,)) for ours, key in names.items()}
    cpu = torch.device("cpu")
    fill(model, checkpoint, recipes, dtype=torch.float32, device=cpu, what=name)
    return model  # in training mode: its statistics are those of the file all the same


@both
def test_sizes_are_read_off_the_file(name: str) -> None:
    halvings = 2 if name == "emu3" else 0
    sizes = {"ch": 32, "ch_mult": (2, 1), "num_res_blocks": 1, "codebook_size": 64}
    assert official(name).config == MoVQConfig(**sizes, attention=(1,), halvings=halvings)
    assert official(name).config.downsample == 2


@both
@pytest.mark.parametrize("size", ["s0", "s1"])
def test_decoding_codes_gives_the_official_pixels(name: str, size: str) -> None:
    vq, io = official(name), golden(f"{name}/io")
    given = {key.split(".", 2)[2]: t for key, t in io.items() if key.startswith(f"vq.{size}.")}
    assert_close(vq.post_quant_conv(vq.lookup(given["codes"])), given["post_quant"], **CLOSE)
    pixels = vq.decode(given["codes"])
    assert_close(pixels, given["pixels"], **CLOSE)
    to_uint8 = nearest_uint8 if name == "lumina2" else chameleon_pixels_to_uint8
    assert torch.equal(to_uint8(given["pixels"]), given["pixels_uint8_hwc"])
    # A value within 1e-4 of a border between two numbers may fall on either side of it.
    apart = to_uint8(pixels).int() - given["pixels_uint8_hwc"].int()
    assert apart.abs().max() <= 1
    assert (apart != 0).float().mean() < 5e-3


@both
def test_encoding_a_picture_gives_the_official_codes(name: str) -> None:
    vq, io = official(name), golden(f"{name}/io")
    assert_close(vq.encode_latents(io["vq.image"]), io["vq.enc_prequant"], **CLOSE)
    assert torch.equal(vq.encode(io["vq.image"]), io["vq.image_codes"])


def test_the_first_frame_needs_the_last_tap_alone() -> None:
    """What is folded for a picture is what the convolution over all frames gives first."""
    vq, io = official("emu3"), golden("emu3/io")
    zq = vq.lookup(io["vq.s0.codes"])
    assert_close(vq.post_quant_conv(zq.unsqueeze(2))[:, :, 0], vq.post_quant_conv(zq))
    step = vq.decoder.get_submodule("time_conv.0")
    frames = torch.stack((zq, torch.randn_like(zq)), dim=2)
    assert_close(step(frames)[:, :, 0], step(zq))
    assert (step(frames)[:, :, 1] - step(zq)).abs().max() > 0.1  # a later frame reads more


def test_another_tokenizer_is_refused() -> None:
    plain = Checkpoint(Path("vq"), [HeldFile(Path("vq"), golden("chameleon_vq/weights"))])
    with pytest.raises(CheckpointError, match="norms that read the codes"):
        movq_sizes(plain, tokenizer_names(plain), "MoVQGAN")
    movq = opened("lumina2")
    with pytest.raises(CheckpointError, match="attention outside the middle"):
        vq_sizes(movq, tokenizer_names(movq), "Chameleon's VQGAN", attend=False)


def test_released_sizes_have_the_published_number_of_parameters() -> None:
    with without_data():
        lumina2 = MoVQ(MoVQConfig())
        emu3 = MoVQ(MoVQConfig(codebook_size=32768, halvings=2))
    assert sum(one.numel() for one in lumina2.parameters()) == 270_669_103
    assert sum(one.numel() for one in emu3.parameters()) == 270_740_287
