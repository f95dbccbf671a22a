"""From a picture's file to what a network sees, by the protocol's rule."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.evaluation.suite.protocol import Preprocessing
from lantern_accel.files import read_bytes_file

_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
}


def read_picture(path: Path) -> tuple[Image.Image, str | None]:
    """Return a picture as RGB, and what it was where it was something else (``grey``, ``CMYK``).

    Raises :class:`DataError` naming a file that cannot be read.
    """
    try:
        with Image.open(io.BytesIO(read_bytes_file(path))) as opened:
            opened.load()
            return to_rgb(opened)
    except Exception as error:  # whatever a damaged picture's decoder raises
        why = f"{type(error).__name__}: {error}"[:120]
        raise DataError(
            f"the picture {path} cannot be read ({why}); replace it, or take it off the list"
        ) from None


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


def prepared(image: Image.Image, rule: Preprocessing, side: int | None) -> Image.Image:
    """Return a picture as the rule wants it; ``side`` of the network's input, None: it takes any."""
    if rule.crop == "centre square":
        short = min(image.size)
        left, top = (image.width - short) // 2, (image.height - short) // 2
        image = image.crop((left, top, left + short, top + short))
    if rule.size is not None and image.size != (rule.size, rule.size):
        image = image.resize((rule.size, rule.size), _FILTERS[rule.resample])
    if rule.to_network != "network" and side is not None and image.size != (side, side):
        image = image.resize((side, side), _FILTERS[rule.to_network])
    return image


def batches(
    paths: Sequence[Path], rule: Preprocessing, side: int | None, size: int
) -> Iterator[tuple[Tensor, dict[Path, str]]]:
    """Yield pictures, uint8 ``[n, 3, h, w]``, in order, with those that were not RGB.

    A batch has ``size`` pictures, fewer where their shapes differ.
    """
    held: list[Tensor] = []
    modes: dict[Path, str] = {}
    for path in paths:
        image, mode = read_picture(path)
        pixels = torch.from_numpy(np.array(prepared(image, rule, side))).permute(2, 0, 1)
        if held and (len(held) == size or held[0].shape != pixels.shape):
            yield torch.stack(held), modes
            held, modes = [], {}
        held.append(pixels)
        if mode is not None:
            modes[path] = mode
    if held:
        yield torch.stack(held), modes
