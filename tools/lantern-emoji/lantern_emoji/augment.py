"""Augmentations of images on white: mirror, shift, shrink, hue rotation; all on torch tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def to_float(images: Tensor) -> Tensor:
    """Return uint8 ``[B, H, W, 3]`` as float32 ``[B, 3, H, W]`` in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def to_uint8(pixels: Tensor) -> Tensor:
    """Return ``[B, 3, H, W]`` about in [-1, 1] as uint8 ``[B, H, W, 3]``."""
    scaled = pixels.float().add(1.0).mul(127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1)


def flip(pixels: Tensor, mask: Tensor) -> Tensor:
    """Mirror the images where bool ``mask [B]`` is set."""
    return torch.where(mask[:, None, None, None], pixels.flip(-1), pixels)


def place(pixels: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Shrink images by ``scale [B]`` in (0, 1] and move them by ``shift [B, 2]`` pixels (x, y).

    What was outside becomes white. Whole-pixel shifts at scale 1 are exact.
    """
    size = pixels.shape[-1]
    theta = pixels.new_zeros(len(pixels), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1.0 / scale
    theta[:, :, 2] = -(2.0 / size) * shift / scale[:, None]
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    # Sampled as 1 - white, so that the zero padding of grid_sample is white.
    return 1.0 - F.grid_sample(1.0 - pixels, grid, mode="bilinear", align_corners=False)


def rotate_hue(pixels: Tensor, angle: Tensor) -> Tensor:
    """Turn colours about the grey axis by ``angle [B]`` radians; greys and white stay."""
    cos, sin = torch.cos(angle), torch.sin(angle)
    axis = (1.0 - cos) / 3.0
    side = sin / math.sqrt(3.0)
    a, b, c = axis + cos, axis - side, axis + side
    rows = [torch.stack(row, -1) for row in ((a, b, c), (c, a, b), (b, c, a))]
    return torch.einsum("bij,bjhw->bihw", torch.stack(rows, 1), pixels).clamp_(-1.0, 1.0)


def random_place(
    pixels: Tensor,
    generator: torch.Generator,
    *,
    smallest: float = 0.7,
    largest_shift: int = 4,
    shrink: float = 0.5,
) -> Tensor:
    """Shift every image by up to ``largest_shift`` px and shrink a share ``shrink`` of them."""
    count = len(pixels)
    drawn = torch.rand(count, 2, generator=generator)
    scale = torch.where(drawn[:, 0] < shrink, smallest + (1.0 - smallest) * drawn[:, 1], 1.0)
    shift = torch.randint(-largest_shift, largest_shift + 1, (count, 2), generator=generator)
    return place(pixels, scale.to(pixels), shift.to(pixels))


def augment(
    pixels: Tensor, flippable: Tensor, generator: torch.Generator, *, hue: float = 0.25
) -> Tensor:
    """Draw one training view of each image ``[B, 3, H, W]``: flip, shift and scale, hue."""
    count = len(pixels)
    coin = torch.rand(count, 3, generator=generator).to(pixels)
    pixels = flip(pixels, flippable & (coin[:, 0] < 0.5))
    pixels = random_place(pixels, generator)
    angle = torch.where(coin[:, 1] < hue, coin[:, 2] * 2.0 * math.pi, torch.zeros_like(coin[:, 2]))
    return rotate_hue(pixels, angle)
