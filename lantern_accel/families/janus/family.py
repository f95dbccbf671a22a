"""Janus as a family: a Llama that draws 576 tokens of LlamaGen's codebook."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import RequestError
from lantern_accel.families.base import (
    Conditions,
    Found,
    Model,
    Parts,
    Prompt,
    Rows,
    Size,
    TextSource,
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
from lantern_accel.families.prompted_drafter import PromptedDrafter, fitting_config
from lantern_accel.families.prompted_family import PromptedFamily
from lantern_accel.families.prompts import CAPTIONS, bucket, check_texts, left_pad
from lantern_accel.families.tokenizer import check_vocabulary, read_tokenizer
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from lantern_accel.families.published import ModelEntry

#: Pixels of the images that are decoded together: one of 384 x 384.
PIXELS_AT_ONCE = 384 * 384


class JanusText:
    """The tokenizer of one model: prompts to token ids; on the host, a few megabytes."""

    def __init__(self, path: Path, manifest: JanusManifest) -> None:
        self.tokenizer = read_tokenizer(path)
        check_vocabulary(self.tokenizer, manifest.target.token_count, path)
        self.manifest = manifest

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each prompt."""
        ids, variant = self.manifest.ids, self.manifest.variant
        return [prompt_ids(self.tokenizer, ids, text, variant) for text in texts]

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids ``[n, longest]``, left-padded, and their mask."""
        rows = self.prompts(prompts)
        return left_pad(rows, max(len(row) for row in rows), self.manifest.ids.pad)

    def release(self) -> None:
        """Do nothing: there is nothing on the device."""


class JanusFamily(PromptedFamily):
    """Janus-Pro and Janus 1.3B, the half that draws."""

    name: ClassVar[str] = "janus"
    manifest_type: ClassVar[type[Manifest]] = JanusManifest
    needs: ClassVar[tuple[str, ...]] = ("target", "vq", "text_tokenizer")

    def detect(self, path: Path, parts: Parts) -> Found | None:
        """Recognise deepseek-ai's layout and transformers'."""
        return detect(path, parts)

    def from_entry(self, entry: ModelEntry) -> Manifest:
        """Return the manifest of a published model."""
        return published_manifest(entry)

    def build(self, manifest: JanusManifest, part: str, ops: TensorOps) -> nn.Module:
        """Build the Llama, its drafter, or LlamaGen's VQ tokenizer."""
        if part == "target":
            return JanusGPT(manifest.target, ops=ops)
        if part == "drafter":
            assert manifest.drafter is not None
            return PromptedDrafter(manifest.drafter, ops=ops)
        return VQModel(manifest.vq)

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

    def unneeded(self, part: str) -> re.Pattern[str] | None:
        """Return the keys of the other parts: one file holds all, and a half that reads pictures."""
        return {"target": BESIDE_TARGET, "vq": BESIDE_VQ}.get(part)

    def text(self, found: Found, device: torch.device, dtype: torch.dtype) -> TextSource | None:
        """Return the tokenizer."""
        path = found.files.get("text_tokenizer")
        manifest: Any = found.manifest
        return None if path is None else JanusText(path, manifest)

    def examples(self, manifest: JanusManifest) -> Sequence[Prompt]:
        """Return captions."""
        return CAPTIONS

    def picture(self, manifest: JanusManifest, size: Size | None = None) -> Size:
        """Return the one size that the model draws."""
        own = (manifest.image_size, manifest.image_size)
        if size not in (None, own):
            assert size is not None
            raise RequestError(
                f"the model {manifest.name!r} draws {own[0]}x{own[1]} pixels only, not "
                f"{size[0]}x{size[1]}"
            )
        return own

    def conditions(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
    ) -> Conditions:
        """Return token ids ``[n, prefix]``, left-padded to a bucket's length."""
        manifest: JanusManifest = model.manifest
        texts = check_texts(prompts, manifest.name)
        self.picture(manifest, size)
        if not isinstance(model.text, JanusText):
            lacks = model.missing.get("text", "a text tokenizer in its folder")
            raise RequestError(f"the model {manifest.name!r} lacks {lacks}")
        return self.conditions_of(model, model.text.prompts(texts), device)

    def conditions_of(
        self, model: Model, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> Conditions:
        """Return the conditions of prompts that are token ids already.

        Raises :class:`RequestError` for a prompt that is longer than the model was trained on.
        """
        manifest: JanusManifest = model.manifest
        longest = max(len(ids) for ids in prompts)
        most = manifest.target.max_positions - manifest.target.num_tokens
        if longest > most:
            raise RequestError(
                f"a prompt has {longest} tokens and the picture {manifest.target.num_tokens}, but the "
                f"model was trained on {manifest.target.max_positions} in all; shorten the prompt to "
                f"{most} tokens"
            )
        length = bucket(longest)
        ids, mask = left_pad(prompts, length, manifest.ids.pad)
        return Conditions(ids.to(device), mask.to(device), shape=length)

    def join(self, model: Model, conditions: Sequence[Conditions]) -> Conditions:
        """Pad prompts to the longest one's bucket."""
        longest = max(one.mask.shape[1] for one in conditions)
        ids, masks = [], []
        for one in conditions:
            extra = longest - one.mask.shape[1]
            ids.append(F.pad(one.condition, (extra, 0), value=model.manifest.ids.pad))
            masks.append(F.pad(one.mask, (extra, 0), value=False))
        return Conditions(torch.cat(ids), torch.cat(masks), longest)

    def fitted(self, model: Model, shape: Hashable) -> tuple[Any, Any]:
        """Return target and drafter for a prompt length; weights are shared."""
        if not isinstance(shape, int):
            return model.target, model.drafter
        return self.sized_parts(model, prefix_length=shape)

    def usual_shape(self, model: Model) -> Hashable:
        """Return the length of a short prompt."""
        manifest: JanusManifest = model.manifest
        return manifest.target.prefix_length

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
        return max(1, PIXELS_AT_ONCE // int(model.manifest.image_size) ** 2)

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
