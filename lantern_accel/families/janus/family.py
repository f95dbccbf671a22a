"""Janus as a family: a Llama that draws 576 tokens of LlamaGen's codebook."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import RequestError
from lantern_accel.families.base import (
    Conditions,
    Found,
    Model,
    Parts,
    Rows,
    finite_pixels,
)
from lantern_accel.families.chameleon.vq import chameleon_pixels_to_uint8
from lantern_accel.families.janus.keys import BESIDE_TARGET, BESIDE_VQ, target_recipes, vq_names
from lantern_accel.families.janus.manifest import DEFAULTS, JanusManifest
from lantern_accel.families.janus.model import JanusConfig, JanusGPT
from lantern_accel.families.janus.official import detect, published_manifest
from lantern_accel.families.janus.text import SpecialIds, prompt_ids
from lantern_accel.families.llamagen.vq import VQConfig, VQModel
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_drafter import fitting_config
from lantern_accel.families.prompted_family import PromptedFamily
from lantern_accel.families.prompts import left_pad
from lantern_accel.families.tokenizer import PromptText
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from lantern_accel.families.published import ModelEntry

#: Pixels of the images that are decoded together: one of 384 x 384.
PIXELS_AT_ONCE = 384 * 384


class JanusText(PromptText):
    """The tokenizer of one model; its prompts name no size."""

    def prompts(self, texts: Sequence[str], rows: int = 0, columns: int = 0) -> list[list[int]]:
        """Return the ids of each prompt."""
        ids, variant = self.manifest.ids, self.manifest.variant
        return [prompt_ids(self.tokenizer, ids, text, variant) for text in texts]


class JanusFamily(PromptedFamily):
    """Janus-Pro and Janus 1.3B, the half that draws."""

    name: ClassVar[str] = "janus"
    manifest_type: ClassVar[type[Manifest]] = JanusManifest
    text_type, target_type, vq_type = JanusText, JanusGPT, VQModel
    #: One file holds all parts, and a half that reads pictures.
    beside: ClassVar[Mapping[str, re.Pattern[str]]] = {"target": BESIDE_TARGET, "vq": BESIDE_VQ}
    shape_names = ("prefix_length",)

    def detect(self, path: Path, parts: Parts) -> Found | None:
        """Recognise deepseek-ai's layout and transformers'."""
        return detect(path, parts)

    def from_entry(self, entry: ModelEntry) -> Manifest:
        """Return the manifest of a published model."""
        return published_manifest(entry)

    def published(self) -> Sequence[ModelEntry]:
        """Return what deepseek-ai published."""
        from lantern_accel.families.janus.published import ENTRIES

        return ENTRIES

    def recipes(
        self, part: str, checkpoint: Checkpoint, manifest: JanusManifest
    ) -> Mapping[str, Recipe]:
        """Rename and stack; the picture tokenizer has LlamaGen's tensors."""
        if part == "target":
            return target_recipes(checkpoint, manifest.target, checkpoint.path)
        if part == "drafter":
            return self.drafter_recipes(checkpoint)
        return {name: Recipe((key,)) for name, key in vq_names(checkpoint).items()}

    def rows(self, model: Model, conditions: Conditions, sampling: Sampling) -> Rows:
        """Return ``[cond; uncond]``: of the prompt without text the ends alone stay, the rest are pads.

        Those pads are tokens like any other: the rows share a mask, which hides what left-pads both.
        """
        condition, mask = conditions.condition, conditions.mask
        if sampling.branches == 1:
            return Rows(condition, mask)
        if sampling.branches == 3:
            raise RequestError(
                f"the model {model.manifest.name!r} has two-way guidance; leave cfg_scale_image out"
            )
        places = torch.arange(mask.shape[1], device=mask.device)
        first = mask.shape[1] - mask.sum(dim=1, keepdim=True)
        ends = (places == first) | (places == mask.shape[1] - 1)
        other = torch.where(ends, condition, model.manifest.ids.pad)
        return Rows(torch.cat((condition, other)), mask)

    def pixels(self, model: Model, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode codes in float32, by Chameleon's rule of rounding, which is Janus's too."""
        grid = model.manifest.target.grid
        parts = torch.split(tokens.view(-1, grid, grid), self.pixels_together(model))
        drawn = (finite_pixels(model.vq.decode_codes(p)) for p in parts)
        return torch.cat([chameleon_pixels_to_uint8(one) for one in drawn])

    def pixels_together(self, model: Model) -> int:
        """Bound the decoder's activations, which would take more than decoding the tokens did."""
        return max(1, PIXELS_AT_ONCE // self.picture(model.manifest)[0] ** 2)

    def codebook(self, model: Model) -> tuple[Tensor, bool]:
        """Return the raw rows, which the decoder normalises."""
        return model.vq.quantize.embedding.weight, True

    def tiny(self) -> JanusManifest:
        """Return a small Janus: rows without a prompt attend to their pads, the drafter has a tap."""
        target = JanusConfig(
            dim=32, n_layer=2, n_head=4, ffn_dim=48, token_count=40, vocab_size=48, code_dim=4,
            grid=5, prefix_length=8, max_positions=64,
        )  # fmt: skip
        return JanusManifest(
            name="tiny-janus",
            ids=SpecialIds(bos=36, pad=37, image_start=38),
            target=target,
            drafter=fitting_config(target, taps=(1,)),
            vq=VQConfig(ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=48, codebook_dim=4),
            defaults=DEFAULTS.within(target.vocab_size),
        )

    def tiny_conditions(self, model: Model, count: int, seed: int) -> Conditions:
        """Return prompts of random words and lengths."""
        ids, length = model.manifest.ids, model.manifest.target.prefix_length
        drawn = random.Random(seed)
        texts = [
            [ids.bos, *(drawn.randrange(36) for _ in range(drawn.randint(1, 6))), ids.image_start]
            for _ in range(count)
        ]
        return Conditions(*left_pad(texts, length, ids.pad), shape=length)
