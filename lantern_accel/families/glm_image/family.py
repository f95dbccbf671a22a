"""GLM-Image as a family: a prior whose tokens diffusers paints from."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import RequestError
from lantern_accel.families.base import Conditions, Found, Model, Rows
from lantern_accel.families.glm_image import official
from lantern_accel.families.glm_image.model import (
    DEFAULTS,
    Codebook,
    CodebookConfig,
    GlmImageConfig,
    GlmImageGPT,
    GlmImageManifest,
    Marks,
)
from lantern_accel.families.glm_image.rendering import render_images
from lantern_accel.families.glm_image.text import GlmImageText
from lantern_accel.families.keys import Change, to_adjacent
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_drafter import PromptedDrafterConfig
from lantern_accel.families.prompted_family import PromptedFamily
from lantern_accel.strategy.values import Sampling


class GlmImageFamily(PromptedFamily[GlmImageManifest]):
    """GLM-Image's prior: tokens of two grids, which the diffusion half turns into an image."""

    name: ClassVar[str] = "glm_image"
    manifest_type: ClassVar[type[Manifest]] = GlmImageManifest
    guided: ClassVar[bool] = False
    text_type, target_type, vq_type = GlmImageText, GlmImageGPT, Codebook
    detect = staticmethod(official.detect)
    from_entry = staticmethod(official.published_manifest)
    render_images = staticmethod(render_images)
    #: One file holds all parts, and a half that reads images.
    beside = official.SIDE_FILES
    rules = official.RULES

    def changes(
        self, part: str, checkpoint: Checkpoint, manifest: GlmImageManifest
    ) -> Sequence[Change]:
        target = manifest.target
        return (to_adjacent(target.head_dim, target.rotated),) if part == "target" else ()

    def rows(
        self, model: Model[GlmImageManifest], conditions: Conditions, sampling: Sampling
    ) -> Rows:
        """Return one row an image: this prior has no guidance."""
        if sampling.guided:
            raise RequestError(
                f"the prior {model.manifest.name!r} decodes without guidance; leave cfg_scale out, or "
                "set it to 1 (guidance_scale is the diffusion half's)",
                field="cfg_scale",
            )
        return Rows(conditions.condition, conditions.mask)

    def drafters_near(self, found: Found[GlmImageManifest]) -> list[Path]:
        """Return the release's own folder, or the prior's where it lies alone."""
        home = found.files["target"]
        home = home if home.is_dir() else home.parent
        return [(home.parent if home.name == official.PRIOR else home) / "drafter"]

    def pixels(
        self, model: Model[GlmImageManifest], tokens: Tensor, shape: Hashable = None
    ) -> Tensor:
        """Return no pixels, ``[n, 0, 0, 3]``: they need the prompt too (:meth:`paint`)."""
        return torch.zeros(len(tokens), 0, 0, 3, dtype=torch.uint8, device=tokens.device)

    def codebook(self, model: Model[GlmImageManifest]) -> tuple[Tensor, bool]:
        """Return the tokenizer's rows, which it compares normalised."""
        return model.vq.embedding.weight, True

    def tiny(self) -> GlmImageManifest:
        """Return a small prior: grouped queries, three axes over half a head, rows of two widths."""
        target = GlmImageConfig(
            dim=32, n_layer=2, n_head=4, n_kv_head=2, ffn_dim=48, token_count=96, vocab_size=48,
            head_rows=52, rotated=6, sections=(1, 1, 1), height=2, width=4, small_tokens=9,
            prefix_length=8, max_positions=1024,
        )  # fmt: skip
        return GlmImageManifest(
            name="tiny-glm-image",
            ids=Marks(pad=49),
            target=target,
            drafter=PromptedDrafterConfig.fitting(target),
            vq=CodebookConfig(codebook_size=48, codebook_dim=4),
            defaults=DEFAULTS.within(48),
        )

    def tiny_prompt(self, manifest: GlmImageManifest, rng: random.Random) -> list[int]:
        return [rng.randrange(50, 96) for _ in range(rng.randint(2, 8))]
