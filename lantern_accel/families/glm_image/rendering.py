"""The diffusion half, which diffusers runs: it paints an image from the large grid's codes."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_accel.errors import LanternWarning, ModelError
from lantern_accel.families.base import Model, Prompt
from lantern_accel.families.glm_image.grids import PIXELS, prior_token_ids
from lantern_accel.families.glm_image.text import GlmImageText
from lantern_accel.families.releases import require

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline
    from PIL.Image import Image

#: What the release has besides the prior's own.
PARTS = ("model_index.json", "transformer", "vae", "scheduler", "text_encoder", "tokenizer")


def render_images(
    model: Model, tokens: Tensor, shape: Hashable, prompts: Sequence[Prompt], seeds: Sequence[int]
) -> list[Image]:
    """Return the images of tokens ``[n, N]``; [] and a warning where they cannot be painted here.

    ``seeds``: of the diffusion's noise, one per image.
    """
    assert isinstance(shape, tuple)
    _, rows, columns = shape
    try:
        pipe = _diffusion_half(model)
    except ModelError as error:
        warnings.warn(
            f"there are no images, the result is the prior's tokens (result.tokens): {error}",
            LanternWarning,
            stacklevel=2,
        )
        return []
    ids = prior_token_ids(tokens, rows, columns).to(pipe.device)
    out: list[Image] = []
    for prompt, seed, prior in zip(prompts, seeds, ids, strict=True):
        generator = torch.Generator().manual_seed(seed)
        done = pipe(
            prompt=str(prompt),
            height=rows * PIXELS,
            width=columns * PIXELS,
            prior_token_ids=prior.unsqueeze(0),
            generator=generator,
        )
        out += done.images
    return out


def _diffusion_half(model: Model) -> GlmImagePipeline:
    """Return the release's pipeline without its prior, loaded once; raises :class:`ModelError`."""
    text = model.text
    assert isinstance(text, GlmImageText)
    if text.renderer is None:
        release = _release(text.path)
        require("diffusers")
        require("transformers")
        from diffusers import GlmImagePipeline

        weight = model.target.weight
        load = GlmImagePipeline.from_pretrained
        pipe = load(release, vision_language_encoder=None, processor=None, torch_dtype=weight.dtype)
        text.renderer = pipe.to(weight.device)
    return text.renderer


def _release(tokenizer: Path) -> Path:
    """Return the released folder around the prior's tokenizer, where the diffusion half is in it."""
    folder = tokenizer.parent.parent
    absent = [part for part in PARTS if not (folder / part).exists()]
    if absent:
        raise ModelError(
            f"the diffusion half in {folder} lacks {', '.join(absent)}; fetch all of zai-org/GLM-Image, "
            "or give the tokens to a GlmImagePipeline as prior_token_ids (docs/models.md)"
        )
    return folder
