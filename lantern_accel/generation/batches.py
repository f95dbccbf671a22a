"""Turns a decoded batch into what was asked for: its rows, pictures and progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from lantern_accel.decoding.engine import Decoded

if TYPE_CHECKING:
    from PIL.Image import Image


def first(decoded: Decoded, count: int) -> Decoded:
    """Return the first images of a batch whose other rows only fill it."""
    if len(decoded.tokens) == count:
        return decoded
    return Decoded(**{name: value[:count] for name, value in vars(decoded).items()})


def pictures(pixels: Tensor) -> list[Image]:
    """Turn pixels, uint8 ``[n, H, W, 3]``, into pictures."""
    from PIL import Image

    return [Image.fromarray(one.numpy()) for one in pixels]


def reporter(
    report: Callable[[int, int], None] | None, before: int, images: int, size: int, count: int
) -> Callable[[int], None] | None:
    """Turn a batch's progress (tokens known by its slowest image) into the request's.

    ``before``: images of earlier batches; ``images``: of this one; ``size``: tokens of an image;
    ``count``: images of the request.
    """
    if report is None:
        return None
    return lambda known: report(before * size + known * images, count * size)
