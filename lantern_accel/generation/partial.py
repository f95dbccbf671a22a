"""Draws an unfinished image: its finished rows of tokens as pixels, and nothing below them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_accel.decoding.target import above_of, row_of
from lantern_accel.device.backend import inferring
from lantern_accel.generation.batches import pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.generation.loaded import Loaded

#: What is shown where nothing is decided yet.
EMPTY = 0xF0


@inferring
def partial_picture(
    pipeline: Loaded, tokens: Tensor, shape: Hashable = None
) -> tuple[Image, int] | None:
    """Return a picture of an image's known tokens, int64 ``[known]``, and how many pixel rows are real.

    Tokens come row by row from the top. The tokenizer's decoder looks at a whole picture, so what is
    below the last finished row is filled with that row, decoded, and then painted over; colours of the
    finished rows still change a little when the rest is known. None before the first row is finished,
    and where a picture is not one grid of rows.
    """
    target, _ = pipeline.model.family.fitted(pipeline.model, shape)
    if above_of(target.config) is not None:
        return None
    total, row = int(target.config.num_tokens), row_of(target.config)
    rows = len(tokens) // row
    if not rows:
        return None
    full = torch.empty(total, dtype=torch.int64)
    full[: rows * row] = tokens[: rows * row]
    for at in range(rows, total // row):  # an end of a row keeps its column
        full[at * row : (at + 1) * row] = tokens[(rows - 1) * row : rows * row]
    pixels = pipeline.pixels(full.unsqueeze(0), shape)
    real = pixels.shape[1] * rows * row // total
    pixels[:, real:] = EMPTY
    return pictures(pixels)[0], real
