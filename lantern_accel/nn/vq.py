"""The VQ image tokenizer of LlamaGen, Janus and Chameleon: encoder, codebook and decoder.

The architecture is VQGAN's (arXiv 2012.09841); :mod:`lantern_accel.nn.movq` builds another one of its
parts. Parameter names are those of LlamaGen's checkpoints;
:mod:`lantern_accel.families.image_tokenizer` has the other ones. Sources: FoundationVision/LlamaGen
``tokenizer_image`` (attention at the lowest resolution, codes compared on the sphere) and
facebookresearch/chameleon ``chameleon/inference/vqgan.py`` (attention in the middle alone, codes
compared as they are).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.nn.sizes import Sizes


class VQConfig(Sizes):
    """Sizes of a VQ tokenizer; the defaults are LlamaGen's ds16 model (71.9M parameters)."""

    in_channels: int = Field(3, ge=1)
    ch: int = Field(128, ge=32, multiple_of=32, description="width of the first level")
    ch_mult: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 1, 2, 2, 4), min_length=1)
    num_res_blocks: int = Field(2, ge=1)
    z_channels: int = Field(256, ge=32, multiple_of=32)
    codebook_size: int = Field(16384, ge=2)
    codebook_dim: int = Field(8, ge=1)
    l2_norm: bool = Field(True, description="codebook rows and latents are compared on the sphere")

    @property
    def downsample(self) -> int:
        """Pixels per token along one side."""
        return int(2 ** (len(self.ch_mult) - 1))


class GroupNorm(nn.GroupNorm):
    """The group norm that every VQGAN uses: 32 groups, eps 1e-6; it does not read the codes."""

    def __init__(self, channels: int) -> None:
        super().__init__(32, channels, eps=1e-6)

    def forward(self, input: Tensor, codes: Tensor | None = None) -> Tensor:
        return super().forward(input)


#: Makes the norm of some channels; called with features ``[B, C, H, W]`` and the image's code vectors.
Norm = Callable[[int], nn.Module]


class ResnetBlock(nn.Module):
    """Two 3x3 convolutions with group norm and swish; a 1x1 shortcut where the width changes."""

    def __init__(self, c_in: int, c_out: int, norm: Norm = GroupNorm) -> None:
        super().__init__()
        self.norm1 = norm(c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = norm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else None

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x, codes)))
        h = self.conv2(F.silu(self.norm2(h, codes)))
        out: Tensor = (x if self.nin_shortcut is None else self.nin_shortcut(x)) + h
        return out


class AttnBlock(nn.Module):
    """Single-head self-attention over all pixels, scale ``c ** -0.5``."""

    def __init__(self, channels: int, norm: Norm = GroupNorm) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x, codes)
        q, k, v = (m(y).reshape(b, c, h * w).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = torch.softmax(torch.matmul(q, k.transpose(1, 2)) * c**-0.5, dim=-1)
        y = torch.matmul(scores, v).transpose(1, 2).reshape(b, c, h, w)
        out: Tensor = x + self.proj_out(y)
        return out


class Resample(nn.Module):
    """A 3x3 convolution that halves the resolution or follows its nearest-neighbour doubling.

    The stride-2 convolution pads one pixel on the right and at the bottom.
    """

    def __init__(self, channels: int, *, down: bool) -> None:
        super().__init__()
        stride, padding = (2, 0) if down else (1, 1)
        self.conv = nn.Conv2d(channels, channels, 3, stride=stride, padding=padding)
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0)
        out: Tensor = self.conv(x)
        return out


class _Stage(nn.Module):
    """One resolution: residual blocks, each with attention if ``attend``, and a change of resolution."""

    def __init__(
        self, c_in: int, c_out: int, blocks: int, attend: bool, resample: str | None, norm: Norm
    ) -> None:
        super().__init__()
        widths = [c_in] + [c_out] * blocks
        self.res = nn.ModuleList(ResnetBlock(a, b, norm) for a, b in itertools.pairwise(widths))
        self.attn = nn.ModuleList(AttnBlock(c_out, norm) for _ in range(blocks if attend else 0))
        self.resample = resample
        if resample is not None:
            self.add_module(resample, Resample(c_out, down=resample == "downsample"))

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x, codes)
            if len(self.attn):
                x = self.attn[i](x, codes)
        if self.resample is not None:
            x = self.get_submodule(self.resample)(x)
        return x


class Coder(nn.Module):
    """The encoder, image ``[B, 3, H, W]`` to features ``[B, z, H/f, W/f]``, or the decoder, the way back.

    The first level is the highest resolution of the encoder, the lowest of the decoder. ``attend``: which
    levels have attention, counted from the highest resolution; the middle always has it.
    """

    def __init__(
        self, config: VQConfig, attend: Collection[int], *, encodes: bool, norm: Norm = GroupNorm
    ) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        start, c_in, c_out = config.ch, config.in_channels, config.z_channels
        blocks, resample, first = config.num_res_blocks, "downsample", 0
        if not encodes:
            widths.reverse()
            start, c_in, c_out = widths[0], c_out, c_in
            blocks, resample, first = blocks + 1, "upsample", len(widths) - 1
        last = len(widths) - 1
        levels = nn.ModuleList(
            _Stage(a, b, blocks, abs(i - first) in attend, resample if i != last else None, norm)
            for i, (a, b) in enumerate(itertools.pairwise([start, *widths]))
        )
        wide = widths[last - first]
        mid = [ResnetBlock(wide, wide, norm), AttnBlock(wide, norm), ResnetBlock(wide, wide, norm)]
        self.conv_in = nn.Conv2d(c_in, start, 3, padding=1)
        inner = {"conv_blocks": levels, "mid": nn.ModuleList(mid)}
        self.order = list(inner) if encodes else list(reversed(inner))
        for name in self.order:
            self.add_module(name, inner[name])
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], c_out, 3, padding=1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        x = self.conv_in(x)
        for name in self.order:
            for part in self.get_submodule(name).children():
                x = part(x, codes)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x, codes)))
        return out


class VQModel(nn.Module):
    """The tokenizer: pixels in [-1, 1] to codes and back; any grid, square or not.

    ``attend``: levels with attention outside the middle, counted from the highest resolution; None: the
    lowest, as LlamaGen's. ``norm``: of the decoder.
    """

    def __init__(
        self, config: VQConfig, *, attend: Collection[int] | None = None, norm: Norm = GroupNorm
    ) -> None:
        super().__init__()
        self.config = config
        levels = (len(config.ch_mult) - 1,) if attend is None else attend
        self.encoder = Coder(config, levels, encodes=True)
        self.decoder = Coder(config, levels, encodes=False, norm=norm)
        self.quant_conv: nn.Module = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(config.codebook_dim, config.z_channels, 1)
        codebook = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.quantize: Any = nn.ModuleDict({"embedding": codebook})

    def codebook(self) -> Tensor:
        """Return the codebook in the space that the decoder reads, ``[V, codebook_dim]``."""
        rows: Tensor = self.quantize.embedding.weight
        return F.normalize(rows, dim=-1) if self.config.l2_norm else rows

    def encode_latents(self, images: Tensor) -> Tensor:
        """Return latents before quantization, ``[B, codebook_dim, h, w]``."""
        out: Tensor = self.quant_conv(self.encoder(images))
        return out

    def nearest_code(self, latents: Tensor) -> Tensor:
        """Return the code with the smallest squared distance, int64 ``[B, h, w]``."""
        z = latents.permute(0, 2, 3, 1)
        if self.config.l2_norm:
            z = F.normalize(z, dim=-1)
        book = self.codebook()
        distance = (
            z.square().sum(-1, keepdim=True)
            + book.square().sum(-1)
            - 2.0 * torch.matmul(z, book.t())
        )
        return distance.argmin(dim=-1)

    def lookup(self, codes: Tensor) -> Tensor:
        """Return codebook vectors of ``codes [B, h, w]`` as ``[B, codebook_dim, h, w]``."""
        return F.embedding(codes.long(), self.codebook()).permute(0, 3, 1, 2)

    def encode(self, images: Tensor) -> Tensor:
        """Return the codes of images ``[B, 3, H, W]`` in [-1, 1], int64 ``[B, h, w]``."""
        return self.nearest_code(self.encode_latents(images))

    def decode_latents(self, zq: Tensor) -> Tensor:
        """Return pixels about in [-1, 1], ``[B, 3, H, W]``, of quantized latents."""
        out: Tensor = self.decoder(self.post_quant_conv(zq))
        return out

    def decode(self, codes: Tensor) -> Tensor:
        """Return pixels about in [-1, 1], ``[B, 3, H, W]``, of codes ``[B, h, w]``."""
        return self.decode_latents(self.lookup(codes))


def pixels_to_uint8(pixels: Tensor) -> Tensor:
    """Return uint8 ``[B, H, W, 3]`` of pixels in [-1, 1]: ``trunc(clamp(127.5 x + 128, 0, 255))``.

    LlamaGen's evaluation code rounds this way.
    """
    scaled = (127.5 * pixels.float() + 128.0).clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def chameleon_pixels_to_uint8(pixels: Tensor) -> Tensor:
    """Return uint8 ``[B, H, W, 3]`` of pixels in [-1, 1]: ``trunc((clamp(x, -1, 1) + 1) / 2 * 255)``.

    Chameleon and Janus round this way; LlamaGen rounds another way (:func:`pixels_to_uint8`).
    """
    scaled = (pixels.float().clamp(-1.0, 1.0) + 1.0) / 2.0 * 255.0
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def nearest_uint8(pixels: Tensor) -> Tensor:
    """Return uint8 ``[B, H, W, 3]`` of pixels in [-1, 1]: ``clamp(round(127.5 (x + 1)), 0, 255)``.

    Lumina-mGPT 2.0 rounds this way.
    """
    scaled = ((pixels.float() + 1.0) * 127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
