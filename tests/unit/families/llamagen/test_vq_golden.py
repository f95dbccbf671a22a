"""LlamaGen's VQ tokenizer against tensors recorded from the official code."""

from __future__ import annotations

import functools
import json

import torch
from support.golden import golden, golden_metadata, load_into
from torch.nn import functional as F
from torch.testing import assert_close

from lantern_accel.nn.vq import VQConfig, VQModel, pixels_to_uint8

CLOSE = {"rtol": 0.0, "atol": 1e-4}


@functools.cache
def official_vq() -> VQModel:
    sizes = golden_metadata("llamagen_vq/weights")
    codes, width = json.loads(sizes["codebook"])
    config = VQConfig(
        ch=int(sizes["ch"]),
        ch_mult=tuple(json.loads(sizes["ch_mult"])),
        num_res_blocks=int(sizes["num_res_blocks"]),
        z_channels=int(sizes["z_channels"]),
        codebook_size=codes,
        codebook_dim=width,
        l2_norm=sizes["l2_norm"] == "true",
    )
    model = VQModel(config)
    load_into(model, golden("llamagen_vq/weights"), "vq")
    return model.eval().requires_grad_(False)


def test_encoding_an_image_gives_the_official_codes() -> None:
    vq, io = official_vq(), golden("llamagen_vq/io")
    assert vq.config.downsample == 16
    assert_close(vq.encode_latents(io["image"]), io["enc_prequant"], **CLOSE)
    assert torch.equal(vq.encode(io["image"]), io["image_codes"])


def test_decoding_codes_gives_the_official_pixels() -> None:
    vq, io = official_vq(), golden("llamagen_vq/io")
    codes = io["codes"].view(2, 4, 4)
    assert_close(vq.lookup(codes), io["zq"], rtol=0.0, atol=1e-6)
    pixels = vq.decode(codes)
    assert_close(pixels, io["pixels"], **CLOSE)
    assert torch.equal(pixels_to_uint8(io["pixels"]), io["pixels_uint8_hwc"])
    ours, theirs = pixels_to_uint8(pixels).int(), io["pixels_uint8_hwc"].int()
    assert (ours - theirs).abs().max() <= 1
    assert (ours != theirs).float().mean() < 1e-3


def test_the_codebook_is_read_on_the_sphere_although_it_is_not_stored_there() -> None:
    vq = official_vq()
    raw = vq.quantize.embedding.weight
    assert (raw.norm(dim=-1) - 1).abs().max() > 0.1
    assert_close(vq.codebook(), F.normalize(raw, dim=-1))
    plain = VQModel(vq.config.model_copy(update={"l2_norm": False}))
    plain.load_state_dict(vq.state_dict())
    assert torch.equal(plain.codebook(), raw)
    # Without the normalisation the same latents find other codes.
    latents = golden("llamagen_vq/io")["enc_prequant"]
    assert not torch.equal(plain.nearest_code(latents), vq.nearest_code(latents))


def test_pixels_are_truncated_and_clamped() -> None:
    pixels = torch.tensor([-2.0, -1.0, 0.0, 0.003, 1.0, 2.0]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert pixels_to_uint8(pixels)[0, 0, :, 0].tolist() == [0, 0, 128, 128, 255, 255]
