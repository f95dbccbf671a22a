"""The two grids that GLM-Image writes one after the other, and where their tokens stand.

Source: transformers 5.23, ``processing_glm_image.py`` (``_get_target_shape``) and
``modeling_glm_image.py`` (``get_rope_index``). A small grid of about 256 tokens has the image's shape
and not its size; the large one has a token per 32 x 32 pixels. All positions are known from the sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lantern_accel.errors import RequestError

#: Rows and columns of a grid.
Grid = tuple[int, int]
#: Pixels along the side of a token of the large grid.
PIXELS = 32
#: The small grid has about this many tokens, whatever the image's size.
SMALL = 256


def grids(rows: int, columns: int, small: int = SMALL) -> tuple[Grid, Grid]:
    """Return the small and the large grid, in the order in which they are written.

    The small one has ``sqrt(small * rows / columns)`` rows, rounded down.
    """
    narrow = math.isqrt(small * rows // columns), math.isqrt(small * columns // rows)
    return narrow, (rows, columns)


def grid_of(width: int, height: int, whose: str) -> Grid:
    """Return the large grid of an image in pixels.

    Raises :class:`RequestError` for sides not multiples of a token's; ``whose``: its name.
    """
    sides = width, height
    columns, rows = (side // PIXELS for side in sides)
    if any(side % PIXELS or side < PIXELS for side in sides):
        raise RequestError(
            f"{whose} generates sizes that are multiples of {PIXELS} pixels, not {width}x{height}; ask "
            "for such a size",
            field="size",
        )
    return rows, columns


def positions(prompt: int, both: tuple[Grid, Grid]) -> Tensor:
    """Return the positions of prompt and image on three axes, int64 ``[3, prompt + N + 1]``.

    Temporal, height, width. A prompt's token i stands at i on all three. A grid stands at one time, from
    which its rows and columns count; what follows it is as far on as its longer side. The last column is
    of the end marker, which is never sampled.
    """
    parts = [torch.arange(prompt).expand(3, -1)]
    at = prompt
    for high, wide in both:
        row = torch.arange(high).repeat_interleave(wide)
        column = torch.arange(wide).repeat(high)
        parts.append(at + torch.stack((torch.zeros_like(row), row, column)))
        at += max(high, wide)
    parts.append(torch.full((3, 1), at))
    return torch.cat(parts, dim=1)


def large_codes(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Return the codes of the large grid, ``[n, rows, columns]``, of tokens ``[n, N]``."""
    return tokens[:, -rows * columns :].reshape(len(tokens), rows, columns)


def prior_token_ids(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Return what diffusers' pipeline takes as ``prior_token_ids``, int64 ``[n, 4 * rows * columns]``.

    One id a patch of 16 x 16 pixels: every code of the large grid becomes two by two of them.
    """
    codes = large_codes(tokens.long(), rows, columns)
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)
