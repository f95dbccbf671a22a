"""Are nearby codes interchangeable? What an image loses when every code becomes a neighbour."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_accel.device.backend import inferring
from lantern_accel.evaluation.schema import Interchange
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.quality.features import EfficientNetLite0, in_parts, to_pixels
from lantern_accel.quality.scoring import tokens_of


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each pair of uint8 images ``[n, H, W, 3]``, dB."""
    mse = (a.double() - b.double()).square().mean((1, 2, 3))
    return 10.0 * torch.log10(255.0**2 / mse.clamp_min(1e-3))


@inferring
def interchange(
    pipeline: Pipeline,
    images: Tensor,
    codes: Tensor,
    ks: Sequence[int],
    seed: int,
    net: EfficientNetLite0 | None,
) -> list[Interchange]:
    """Replace every code by a random one of its ``k`` nearest, for each k, and by any code at all.

    ``images`` uint8 ``[n, H, W, 3]``, ``codes`` int64 ``[n, tokens]``, both on the host.
    """
    vocab = len(pipeline.model.family.codebook(pipeline.model)[0])
    generator = torch.Generator().manual_seed(seed)
    whole = pipeline.pixels(tokens_of(pipeline, codes))
    rows = []
    for k in [0, *(k for k in ks if k < vocab), None]:
        if k is None:
            name = "any code"
            other = torch.randint(vocab, codes.shape, generator=generator)
        elif k == 0:
            name, other = "nothing: the reconstruction itself", codes
        else:
            name = f"one of the {k} nearest codes"
            table = pipeline.neighbours(k).cpu().long()
            pick = torch.randint(k, codes.shape, generator=generator)
            other = table[codes].gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        seen = pipeline.pixels(tokens_of(pipeline, other))
        distance = None
        if net is not None:
            gap = in_parts(net.distance, to_pixels(seen), to_pixels(whole))
            distance = float(gap.mean())
        rows.append(
            Interchange(
                replaced_by=name,
                k=k,
                psnr=float(psnr(seen, whole).mean()),
                psnr_to_image=float(psnr(seen, images).mean()),
                feature_distance=distance,
            )
        )
    return rows
