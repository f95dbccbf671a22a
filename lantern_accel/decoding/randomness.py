"""Draws all randomness of a request: keys of its noise, or uniforms in advance.

Both are functions of the 64-bit seed and the image's number in the request, by one counter-based
generator (:mod:`lantern_accel.device.noise`), so that no two seeds share an image, and an image is the
same alone and in a batch. Keys are for decoding in which the seed decides every token; uniforms, a row a
step, are for the papers' tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_accel.device.noise import noise_keys, threefry

#: Uniforms stay this far below 1, so that ``u * total < total`` in float32.
HEADROOM = 2.0**-22


def image_keys(seed: int, images: Sequence[int]) -> Tensor:
    """Return the keys of a request's images, int32 ``[B, 3]``."""
    return noise_keys([seed] * len(images), images)


def draw_uniforms(seed: int, images: Sequence[int], steps: int, columns: int) -> Tensor:
    """Return float32 uniforms in (0, 1), ``[len(images), steps, columns]``, on the host.

    Those of step s and column c are the word that noise has at position s for code c.
    """
    low, high, image = (image_keys(seed, images)[:, i].view(-1, 1, 1) for i in range(3))
    column = torch.arange((columns + 1) // 2, dtype=torch.int32)
    counter = (torch.arange(steps, dtype=torch.int32) << 16).unsqueeze(-1) | column
    words = torch.stack(threefry(low, high, counter, image), dim=-1).flatten(-2)[..., :columns]
    # Midpoints of a 2**-24 grid: never 0, so that a code without probability is never accepted.
    raw = (words >> 9) & ((1 << 23) - 1)
    return ((2 * raw + 1).double() / 2**24).clamp(max=1 - HEADROOM).float()
