"""Chameleon's VQGAN image tokenizer, which Anole and Lumina-mGPT draw with.

Parameter names are those of Meta's ``vqgan.ckpt``. Source: facebookresearch/chameleon
``chameleon/inference/vqgan.py``, the VQGAN of arXiv 2012.09841 without attention outside the middle;
codebook rows and latents are compared as they are, not on the sphere. Level 0 is the highest resolution.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.families.llamagen.vq import (
    AttnBlock,
    Downsample,
    ResnetBlock,
    Upsample,
    VQConfig,
    VQModel,
    group_norm,
)


class _Mid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class _Level(nn.Module):
    """One resolution: residual blocks, then a change of resolution unless it is the last."""

    def __init__(self, c_in: int, c_out: int, blocks: int, resample: str) -> None:
        super().__init__()
        widths = [c_in] + [c_out] * blocks
        self.block = nn.ModuleList(ResnetBlock(a, b) for a, b in itertools.pairwise(widths))
        self._resample = resample
        if resample == "down":
            self.downsample = Downsample(c_out)
        elif resample == "up":
            self.upsample = Upsample(c_out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        if self._resample == "down":
            x = self.downsample(x)
        elif self._resample == "up":
            x = self.upsample(x)
        return x


class ChameleonEncoder(nn.Module):
    """Image ``[B, 3, H, W]`` to features ``[B, z, H/f, W/f]``."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.in_channels, config.ch, 3, padding=1)
        self.down = nn.ModuleList(
            _Level(
                config.ch if i == 0 else widths[i - 1],
                width,
                config.num_res_blocks,
                "down" if i != last else "",
            )
            for i, width in enumerate(widths)
        )
        self.mid = _Mid(widths[-1])
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        x = self.mid(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class ChameleonDecoder(nn.Module):
    """Features ``[B, z, h, w]`` to an image ``[B, 3, h*f, w*f]``."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid = _Mid(widths[-1])
        self.up = nn.ModuleList(
            _Level(
                widths[min(i + 1, last)],
                width,
                config.num_res_blocks + 1,
                "up" if i != 0 else "",
            )
            for i, width in enumerate(widths)
        )
        self.norm_out = group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], config.in_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


def chameleon_vq_config(**changes: object) -> VQConfig:
    """Return the sizes of Meta's ``vqgan.ckpt`` (8192 codes of width 256), with changes."""
    sizes: dict[str, object] = {"codebook_size": 8192, "codebook_dim": 256, "l2_norm": False}
    return VQConfig.model_validate({**sizes, **changes})


class ChameleonVQ(VQModel):
    """The tokenizer: pixels in [-1, 1] to codes and back; any grid, square or not."""

    encoder_type = ChameleonEncoder
    decoder_type = ChameleonDecoder


def chameleon_pixels_to_uint8(pixels: Tensor) -> Tensor:
    """Return uint8 ``[B, H, W, 3]`` of pixels in [-1, 1]: ``trunc((clamp(x, -1, 1) + 1) / 2 * 255)``.

    Chameleon rounds this way; LlamaGen rounds another way (see its ``pixels_to_uint8``).
    """
    scaled = (pixels.float().clamp(-1.0, 1.0) + 1.0) / 2.0 * 255.0
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
