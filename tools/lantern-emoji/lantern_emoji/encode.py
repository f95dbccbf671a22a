"""From pixels to codes and back: training images under several views, scenes, pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import DataError
from lantern_accel.nn.vq import VQModel
from lantern_accel.progress import Progress
from lantern_emoji.augment import flip, random_place, to_float, to_uint8
from lantern_emoji.data import EmojiDataset
from lantern_emoji.scenes import Scene, render_scene


def psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the peak signal-to-noise ratio of each image pair ``[n, H, W, 3]``, in dB."""
    mse = ((a.astype(np.float64) - b.astype(np.float64)) ** 2).mean(axis=(1, 2, 3))
    return np.asarray(10.0 * np.log10(255.0**2 / np.maximum(mse, 1e-3)), dtype=np.float64)


@torch.no_grad()
def reconstruct(
    model: VQModel, images: NDArray[np.uint8], batch: int = 64
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pass images uint8 ``[n, H, W, 3]`` through the tokenizer; return them and codes ``[n, h, w]``."""
    model.eval()
    device = next(model.parameters()).device
    out, codes = [], []
    for start in range(0, len(images), batch):
        part = torch.from_numpy(images[start : start + batch]).to(device)
        code = model.encode(to_float(part))
        codes.append(code.cpu().numpy())
        out.append(to_uint8(model.decode(code)).cpu().numpy())
    return np.concatenate(out), np.concatenate(codes)


def _nearest(model: VQModel, latents: Tensor) -> Tensor:
    """``model.nearest_code`` of ``[B, d, h, w]`` as ``[B, h * w]``, on the sphere in one product."""
    if not model.config.l2_norm:
        return model.nearest_code(latents).flatten(1)
    unit = F.normalize(latents, dim=1).flatten(2).transpose(1, 2)
    return torch.matmul(unit, model.codebook().t()).argmax(-1)


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@torch.no_grad()
def encode_pixels(
    model: VQModel, pixels: Tensor, dtype: torch.dtype = torch.float32
) -> NDArray[np.int16]:
    """Return the codes of pixels ``[B, 3, H, W]`` in [-1, 1], int16 ``[B, h * w]``."""
    device = next(model.parameters()).device
    with _autocast(device, dtype):
        latents = model.encode_latents(pixels.to(device))
    return _nearest(model, latents.float()).cpu().numpy().astype(np.int16)


def encode_dataset(
    model: VQModel,
    data: EmojiDataset,
    *,
    views: int = 8,
    batch: int = 16,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> NDArray[np.int16]:
    """Return the codes of every image under several views, int16 ``[n, views, h * w]``.

    View 0 is the image itself, view 1 its mirror image (the image again where that would show
    something else); the rest are shifted, some also shrunk, and mirrored at random where allowed.
    """
    if not len(data.images):
        raise DataError(
            "there are no images to encode; run `python tools/lantern-emoji data` first"
        )
    progress = Progress() if progress is None else progress
    progress.start("encoding the images", views * len(data.images))
    codes: list[NDArray[np.int16]] = []
    for view in range(views):
        generator = torch.Generator().manual_seed(view)
        part: list[NDArray[np.int16]] = []
        for start in range(0, len(data.images), batch):
            pixels = to_float(torch.from_numpy(data.images[start : start + batch]))
            mirror = torch.tensor([r.flippable for r in data.records[start : start + batch]])
            if view > 1:
                mirror &= torch.rand(len(pixels), generator=generator) < 0.5
            if view:
                pixels = flip(pixels, mirror)
            if view > 1:
                pixels = random_place(pixels, generator, smallest=0.8, largest_shift=3)
            part.append(encode_pixels(model, pixels, dtype))
            progress.advance(len(pixels))
        codes.append(np.concatenate(part))
    progress.finish()
    return np.stack(codes, axis=1)


def encode_scenes(
    model: VQModel,
    data: EmojiDataset,
    scenes: Sequence[Scene],
    *,
    batch: int = 32,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> NDArray[np.int16]:
    """Return the codes of composed scenes, int16 ``[n, h * w]``."""
    progress = Progress() if progress is None else progress
    progress.start("encoding the scenes", len(scenes))
    out = []
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        drawn = np.stack([render_scene(data, scene) for scene in part])
        out.append(encode_pixels(model, to_float(torch.from_numpy(drawn)), dtype))
        progress.advance(len(part))
    progress.finish()
    return np.concatenate(out)
