"""GLM-Image as a family: a prior whose tokens diffusers paints from."""

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
)
from lantern_accel.families.glm_image.grids import PIXELS
from lantern_accel.families.glm_image.keys import (
    BESIDE_TARGET,
    BESIDE_VQ,
    CODEBOOK,
    target_recipes,
)
from lantern_accel.families.glm_image.manifest import DEFAULTS, GlmImageManifest, Marks
from lantern_accel.families.glm_image.model import (
    Codebook,
    CodebookConfig,
    GlmImageConfig,
    GlmImageGPT,
)
from lantern_accel.families.glm_image.official import detect, published_manifest
from lantern_accel.families.glm_image.painting import paint
from lantern_accel.families.glm_image.text import GlmImageText
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_drafter import PromptedDrafter, fitting_config
from lantern_accel.families.prompted_family import PromptedFamily
from lantern_accel.families.prompts import CAPTIONS, bucket, check_texts, left_pad
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.families.published import ModelEntry


class GlmImageFamily(PromptedFamily):
    """GLM-Image's prior: tokens of two grids, which the diffusion half turns into a picture."""

    name: ClassVar[str] = "glm_image"
    manifest_type: ClassVar[type[Manifest]] = GlmImageManifest
    guided: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("target", "vq", "text_tokenizer")

    def detect(self, path: Path, parts: Parts) -> Found | None:
        """Recognise the released folder, and the prior's own within it."""
        return detect(path, parts)

    def from_entry(self, entry: ModelEntry) -> Manifest:
        """Return the manifest of the published model."""
        return published_manifest(entry)

    def build(self, manifest: GlmImageManifest, part: str, ops: TensorOps) -> nn.Module:
        """Build the prior, its drafter, or the codebook that says which codes are alike."""
        if part == "target":
            return GlmImageGPT(manifest.target, ops=ops)
        if part == "drafter":
            assert manifest.drafter is not None
            return PromptedDrafter(manifest.drafter, ops=ops)
        return Codebook(manifest.vq)

    def published(self) -> Sequence[ModelEntry]:
        """Return what zai-org published."""
        from lantern_accel.families.glm_image.published import ENTRIES

        return ENTRIES

    def recipes(
        self, part: str, checkpoint: Checkpoint, manifest: GlmImageManifest
    ) -> Mapping[str, Recipe]:
        """Rename, stack, reorder the rows that turn, and keep the head's rows of codes."""
        if part == "target":
            return target_recipes(checkpoint, manifest.target)
        if part == "drafter":
            return self.drafter_recipes(checkpoint)
        return {"embedding.weight": Recipe((CODEBOOK,))}

    def unneeded(self, part: str) -> re.Pattern[str] | None:
        """Return the keys of the other parts: one file holds all, and a half that reads pictures."""
        return {"target": BESIDE_TARGET, "vq": BESIDE_VQ}.get(part)

    def text(self, found: Found, device: torch.device, dtype: torch.dtype) -> TextSource | None:
        """Return the tokenizer."""
        path = found.files.get("text_tokenizer")
        manifest: Any = found.manifest
        return None if path is None else GlmImageText(path, manifest)

    def examples(self, manifest: GlmImageManifest) -> Sequence[Prompt]:
        """Return captions."""
        return CAPTIONS

    def picture(self, manifest: GlmImageManifest, size: Size | None = None) -> Size:
        """Return the width and height of a size that the model can draw."""
        rows, columns = manifest.grid(size)
        return columns * PIXELS, rows * PIXELS

    def conditions(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
    ) -> Conditions:
        """Return token ids ``[n, prefix]``, left-padded to a bucket's length."""
        manifest: GlmImageManifest = model.manifest
        texts = check_texts(prompts, manifest.name)
        rows, columns = manifest.grid(size)
        if not isinstance(model.text, GlmImageText):
            lacks = model.missing.get("text", "a text tokenizer in its folder")
            raise RequestError(f"the model {manifest.name!r} lacks {lacks}")
        given = model.text.prompts(texts, rows, columns)
        return self.conditions_of(model, given, device, (rows, columns))

    def conditions_of(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        grid: tuple[int, int],
    ) -> Conditions:
        """Return the conditions of prompts that are token ids already; ``grid``: the large one's sides.

        Raises :class:`RequestError` for a prompt that is longer than the model was trained on.
        """
        manifest: GlmImageManifest = model.manifest
        rows, columns = manifest.grid((grid[1] * PIXELS, grid[0] * PIXELS))
        sized = manifest.target.model_copy(update={"height": rows, "width": columns})
        longest = max(len(ids) for ids in prompts)
        most = manifest.target.max_positions - sized.num_tokens
        if longest > most:
            raise RequestError(
                f"a prompt has {longest} tokens and the picture {sized.num_tokens}, but the model was "
                f"trained on {manifest.target.max_positions} in all; shorten the prompt to {most} tokens "
                "or ask for a smaller picture"
            )
        length = bucket(longest)
        ids, mask = left_pad(prompts, length, manifest.marks.pad)
        return Conditions(ids.to(device), mask.to(device), shape=(length, rows, columns))

    def join(self, model: Model, conditions: Sequence[Conditions]) -> Conditions:
        """Pad prompts to the longest one's bucket."""
        shape: Any = max(one.shape for one in conditions)  # type: ignore[type-var]
        ids, masks = [], []
        for one in conditions:
            extra = int(shape[0]) - one.mask.shape[1]
            ids.append(F.pad(one.condition, (extra, 0), value=model.manifest.marks.pad))
            masks.append(F.pad(one.mask, (extra, 0), value=False))
        return Conditions(torch.cat(ids), torch.cat(masks), shape)

    def fitted(self, model: Model, shape: Hashable) -> tuple[Any, Any]:
        """Return target and drafter for a prompt length and a picture size; weights are shared."""
        if not isinstance(shape, tuple):
            return model.target, model.drafter
        length, rows, columns = shape
        return self.sized_parts(model, prefix_length=length, height=rows, width=columns)

    def usual_shape(self, model: Model) -> Hashable:
        """Return the shape of a short prompt and the default picture size."""
        c: GlmImageConfig = model.manifest.target
        return (c.prefix_length, c.height, c.width)

    def rows(self, model: Model, conditions: Conditions, sampling: Sampling) -> Rows:
        """Return one row an image: this prior has no guidance."""
        if sampling.guided:
            raise RequestError(
                f"the prior {model.manifest.name!r} is drawn without guidance; leave cfg_scale out, or "
                "set it to 1 (guidance_scale is the diffusion half's)"
            )
        return Rows(conditions.condition, conditions.mask)

    def pixels(self, model: Model, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Return no pixels, ``[n, 0, 0, 3]``: they need the prompt too (:meth:`paint`)."""
        return torch.zeros(len(tokens), 0, 0, 3, dtype=torch.uint8, device=tokens.device)

    def paint(
        self,
        model: Model,
        tokens: Tensor,
        shape: Hashable,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
    ) -> list[Image]:
        """Paint with the diffusion half, where it and diffusers are there; else say what is missing."""
        return paint(model, tokens, shape, [str(prompt) for prompt in prompts], seeds)

    def codebook(self, model: Model) -> tuple[Tensor, bool]:
        """Return the tokenizer's rows, which it compares normalised."""
        return model.vq.embedding.weight, True

    def tiny(self) -> GlmImageManifest:
        """Return a small prior: grouped queries, three axes over half a head, rows of two widths."""
        target = GlmImageConfig(
            dim=32, n_layer=2, n_head=4, n_kv_head=2, ffn_dim=48, token_count=96, vocab_size=48,
            rotated=6, sections=(1, 1, 1), height=2, width=4, small_tokens=9,
            prefix_length=8, max_positions=1024,
        )  # fmt: skip
        return GlmImageManifest(
            name="tiny-glm-image",
            marks=Marks(pad=49),
            target=target,
            drafter=fitting_config(target),
            vq=CodebookConfig(codebook_size=48, codebook_dim=4),
            defaults=DEFAULTS.within(48),
        )

    def tiny_conditions(self, model: Model, count: int, seed: int) -> Conditions:
        """Return prompts of random words and lengths."""
        target: GlmImageConfig = model.manifest.target
        drawn = random.Random(seed)
        texts = [
            [drawn.randrange(50, 96) for _ in range(drawn.randint(2, 8))] for _ in range(count)
        ]
        ids, mask = left_pad(texts, target.prefix_length, model.manifest.marks.pad)
        return Conditions(ids, mask, shape=(target.prefix_length, target.height, target.width))
