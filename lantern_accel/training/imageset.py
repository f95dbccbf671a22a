"""Reads a folder of captioned images with ``captions.jsonl``, a line per image, and encodes them.

``{"file": "a.png", "prompt": "a red heart"}``; for a class-conditional model the prompt is the class
id. The middle of every image is cut out in the shape of the model's images, then resized.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_accel.device.context import inference
from lantern_accel.errors import DataError
from lantern_accel.files import UnreadableFile, read_bytes_file, read_text_file
from lantern_accel.generation.pipeline import Pipeline

CAPTIONS = "captions.jsonl"


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 ``[n, H, W, 3]`` with their prompts; ``skipped`` names what could not be read."""

    pixels: NDArray[np.uint8]
    prompts: list[str | int]
    skipped: dict[str, str] = field(default_factory=dict)


def to_rgb(image: Image.Image) -> tuple[Image.Image, str | None]:
    """Return an image in RGB, transparency on white, and the name of its own mode where not RGB."""
    if image.mode == "RGB":
        return image, None
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.asarray(image, dtype=np.float64)
        if image.mode.startswith("I;16") or grey.max(initial=0.0) > 255:
            grey = grey / 257.0
        return Image.fromarray(grey.clip(0, 255).round().astype(np.uint8)).convert("RGB"), "grey"
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        white.alpha_composite(rgba)
        return white.convert("RGB"), "transparent"
    names = {"L": "grey", "1": "grey", "P": "palette"}
    return image.convert("RGB"), names.get(image.mode, image.mode)


def middle(image: Image.Image, width: int, height: int) -> NDArray[np.uint8]:
    """Return the middle of an image in this shape, transparency on white, ``[height, width, 3]``."""
    rgb, _ = to_rgb(image)
    scale = min(rgb.width / width, rgb.height / height)
    wide, high = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (rgb.width - wide) // 2, (rgb.height - high) // 2
    cut = rgb.crop((left, top, left + wide, top + high))
    return np.asarray(cut.resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def field_of(path: Path, number: int, line: str, name: str) -> str | int:
    """Return a field of a line of JSON, text or a number; raises :class:`DataError` with the line."""
    try:
        value = json.loads(line)[name]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(f"{path}, line {number}: expected {name!r} in {line[:80]!r}") from None
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise DataError(f"{path}, line {number}: {name} cannot be {value!r}")
    return value


def caption_lines(path: Path, lines: Sequence[str]) -> Iterator[tuple[str, str | int]]:
    """Go through the files and prompts that the lines of a list name; raises :class:`DataError`."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = field_of(path, number, line, "prompt")
            yield str(field_of(path, number, line, "file")), prompt


def read_images(folder: Path, width: int, height: int | None = None) -> ImageSet:
    """Read a folder of captioned images; files that cannot be read are skipped, and named.

    They become ``width x height`` pixels, square where only a width is given.
    Raises :class:`DataError` where the list is missing or malformed, or no image could be read.
    """
    path = folder / CAPTIONS
    try:
        lines = read_text_file(path).splitlines()
    except UnreadableFile as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); write it again") from None
    except OSError:
        raise DataError(
            f"{path} is not there; write a line for each image, such as "
            '{"file": "a.png", "prompt": "a red heart"}'
        ) from None
    pixels, prompts, skipped = [], [], {}
    for name, prompt in caption_lines(path, lines):
        try:
            with Image.open(io.BytesIO(read_bytes_file(folder / name))) as image:
                pixels.append(middle(image, width, height or width))
        except Exception as error:  # whatever a damaged image's decoder raises
            skipped[name] = f"{type(error).__name__}: {error}"[:120]
            continue
        prompts.append(prompt)
    if not pixels:
        why = next(iter(skipped.items()), ("the list", "it is empty"))
        raise DataError(f"no image in {folder} could be read (the first, {why[0]}: {why[1]})")
    return ImageSet(np.stack(pixels), prompts, skipped)


def to_pixels(images: Tensor) -> Tensor:
    """Return uint8 ``[n, H, W, 3]`` as float32 ``[n, 3, H, W]`` in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def encode_images(pipeline: Pipeline, images: NDArray[np.uint8], batch: int = 16) -> Tensor:
    """Return the codes of images uint8 ``[n, H, W, 3]``, int64 ``[n, tokens]`` on the host."""
    pixels = to_pixels(torch.from_numpy(images))
    vq, device = pipeline.model.vq, pipeline.backend.device
    with inference(pipeline.backend):
        parts = [vq.encode(part.to(device)).flatten(1).cpu() for part in torch.split(pixels, batch)]
    return torch.cat(parts).long()
