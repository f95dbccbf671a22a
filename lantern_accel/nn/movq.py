"""The MoVQ image tokenizer: a VQGAN whose norms read codes.

The architecture is MoVQ's (arXiv 2209.09002). Sources: ai-forever/MoVQGAN, and ``emu3/tokenizer`` of
baaivision/Emu3, which was trained on video: there a code stands for four frames. An image is the first
frame of a video that has no more, and zeros stand before it, so that the last tap of every convolution
over time reads the image and the others read nothing. Decoding is therefore a network of images, and
exact.

Names of parameters are :class:`~lantern_accel.nn.vq.VQModel`'s with those of the official files for what
is added; :func:`lantern_accel.families.image_tokenizer.tokenizer_names` has the official ones.
"""

from __future__ import annotations

import functools
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.nn.vq import GroupNorm, VQConfig, VQModel


class MoVQConfig(VQConfig):
    """Sizes of a MoVQ tokenizer; the defaults are MoVQGAN's 270M model."""

    ch: int = Field(256, ge=32, multiple_of=32, description="width of the first level")
    ch_mult: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 2, 4), min_length=1)
    z_channels: int = Field(4, ge=1)
    codebook_dim: int = Field(4, ge=1)
    l2_norm: bool = False
    attention: tuple[int, ...] = Field((3,), description="levels, 0 the highest resolution")
    halvings: int = Field(0, ge=0, le=8, description="of time: a code stands for 2 ** this frames")


class SpatialNorm(nn.Module):
    """A group norm, scaled and shifted at every place by what the nearest code says.

    ``width``: numbers of a code vector. All places of a code have one scale and shift, which are
    therefore computed once a code and never enlarged.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm_layer = GroupNorm(channels)
        self.conv_y = nn.Conv2d(width, channels, 1)
        self.conv_b = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        high, wide = codes.shape[-2:]
        scale, shift = (conv(codes)[:, :, :, None, :, None] for conv in (self.conv_y, self.conv_b))
        places = self.norm_layer(x).unflatten(3, (wide, -1)).unflatten(2, (high, -1))
        return torch.addcmul(shift, places, scale).view(x.shape)


class CausalConv(nn.Module):
    """A convolution over time and place that reads no later frame; zeros stand before the first."""

    def __init__(self, channels: int, taps: int, side: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(
            channels, channels, (taps, side, side), (stride, 1, 1), (0, side // 2, side // 2)
        )
        self.before = taps - stride

    def forward(self, x: Tensor) -> Tensor:
        """Convolve frames ``[B, C, T, h, w]``, or ``[B, C, h, w]``: the first, by the last tap."""
        out: Tensor
        if x.dim() == 5:
            out = self.conv(F.pad(x, (0, 0, 0, 0, self.before, 0)))
        else:
            last = self.conv.weight[:, :, -1]
            out = F.conv2d(x, last, self.conv.bias, padding=last.shape[-1] // 2)
        return out


class StatisticsNorm(nn.Module):
    """A batch norm in evaluation, eps 1e-5: by the statistics of its training, whatever the mode."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class TimeBlock(nn.Module):
    """Two causal convolutions with norm and swish, added to what they read."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = StatisticsNorm(channels), CausalConv(channels, 3, 3)
        self.norm2, self.conv2 = StatisticsNorm(channels), CausalConv(channels, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = x + self.conv2(F.silu(self.norm2(h)))
        return out


class TimeStep(nn.Module):
    """A causal convolution and swish, where the number of frames halves or has been doubled."""

    def __init__(self, channels: int, taps: int, stride: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, taps, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x))


class MoVQ(VQModel):
    """The tokenizer: pixels ``[B, 3, H, W]`` in [-1, 1] to codes ``[B, h, w]`` and back, in float32."""

    config: MoVQConfig

    def __init__(self, config: MoVQConfig) -> None:
        norm = functools.partial(SpatialNorm, width=config.codebook_dim)
        super().__init__(config, attend=config.attention, norm=norm)
        if not config.halvings:
            return
        width, steps, blocks = config.z_channels, config.halvings, config.num_res_blocks
        self.quant_conv, self.post_quant_conv = (CausalConv(width, 3, 1) for _ in range(2))
        for coder, taps, stride in ((self.encoder, 4, 2), (self.decoder, 3, 1)):
            coder.time_res_stack = nn.Sequential(*(TimeBlock(width) for _ in range(blocks)))
            coder.time_conv = nn.Sequential(*(TimeStep(width, taps, stride) for _ in range(steps)))

    def encode_latents(self, images: Tensor) -> Tensor:
        z = self.encoder(images)
        if self.config.halvings:  # an image is shown for all frames of a code
            frames = z.unsqueeze(2).expand(-1, -1, 2**self.config.halvings, -1, -1)
            z = self.encoder.get_submodule("time_conv")(frames).squeeze(2)
            z = self.encoder.get_submodule("time_res_stack")(z)
        out: Tensor = self.quant_conv(z)
        return out

    def decode_latents(self, zq: Tensor) -> Tensor:
        """Return pixels about in [-1, 1], ``[B, 3, H, W]``; norms read what time made of ``zq``."""
        z = self.post_quant_conv(zq)
        if self.config.halvings:
            both = self.decoder.get_submodule("time_res_stack")(torch.cat((z, zq)))
            z, zq = self.decoder.get_submodule("time_conv")(both).chunk(2)
        out: Tensor = self.decoder(z, zq)
        return out
