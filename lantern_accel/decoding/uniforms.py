"""All randomness of a request, drawn in advance: one stream an image, a row a step.

The step takes uniforms as a tensor and draws by inverse CDF, so that the same seed makes the same
decisions on every device (in float32), whatever else is in the batch.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

#: Uniforms stay this far below 1, so that ``u * total < total`` in float32.
HEADROOM = 2.0**-22


def image_generator(seed: int, image: int) -> torch.Generator:
    """Return the host generator of one image of a request."""
    digest = hashlib.sha256(f"lantern_accel/{seed}/{image}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_uniforms(seed: int, images: list[int], steps: int, columns: int) -> Tensor:
    """Return float32 uniforms in (0, 1), ``[len(images), steps, columns]``, on the host.

    ``images`` are indices within the request: image i gets the same numbers alone and in a batch.
    """
    rows = []
    for image in images:
        # Midpoints of a 2**-24 grid: never 0, so that a code without probability is never accepted.
        raw = torch.randint(0, 2**23, (steps, columns), generator=image_generator(seed, image))
        rows.append(((2 * raw + 1).double() / 2**24).clamp(max=1 - HEADROOM).float())
    return torch.stack(rows)
