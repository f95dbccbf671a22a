"""Chameleon as a family: Anole and Lumina-mGPT, text and pictures in one vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.checkpoints.layouts import drafter_weights
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.families.base import (
    Conditions,
    DrafterFiles,
    Found,
    Model,
    Parts,
    Rows,
    finite_pixels,
)
from lantern_accel.families.chameleon.drafter import ChameleonDrafter
from lantern_accel.families.chameleon.keys import (
    BESIDE_TARGET,
    BESIDE_VQ,
    drafter_recipes,
    published_drafter,
    target_recipes,
)
from lantern_accel.families.chameleon.manifest import DEFAULTS, ChameleonManifest
from lantern_accel.families.chameleon.model import ChameleonConfig, ChameleonGPT
from lantern_accel.families.chameleon.official import detect, published_manifest
from lantern_accel.families.chameleon.sizes import (
    VQ_PREFIX,
    drafter_config,
    drafter_said,
    fitting_drafter,
)
from lantern_accel.families.chameleon.text import (
    SpecialIds,
    anole_image_only,
    anole_prompt,
    anole_unconditional,
    lumina_prompt,
    lumina_unconditional,
)
from lantern_accel.families.chameleon.vq import (
    ChameleonVQ,
    chameleon_pixels_to_uint8,
    chameleon_vq_config,
)
from lantern_accel.families.llamagen.drafter import start_drafter
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_family import TokenFamily
from lantern_accel.families.prompts import left_pad
from lantern_accel.families.tokenizer import PromptText
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from lantern_accel.families.published import ModelEntry

#: Pixels of the images that are decoded together: one of 512 x 512.
PIXELS_AT_ONCE = 512 * 512
#: Tokens of a prompt that fit beside a model's own picture in any case.
LONG_PROMPT = 256


class ChameleonText(PromptText):
    """The tokenizer of one model, with the prompt that it was trained on."""

    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        """Return the ids of each prompt for a picture of ``rows x columns`` codes."""
        ids, code = self.manifest.ids, self.manifest.vq.downsample
        if self.manifest.variant == "anole":
            return [anole_prompt(self.tokenizer, ids, text) for text in texts]
        return [lumina_prompt(self.tokenizer, ids, text, rows, columns, code) for text in texts]


class ChameleonFamily(TokenFamily):
    """Anole-7B and Lumina-mGPT-7B, and what else shares their trunk and vocabulary."""

    name: ClassVar[str] = "chameleon"
    manifest_type: ClassVar[type[Manifest]] = ChameleonManifest
    text_type = ChameleonText
    #: Hugging Face's files hold target and VQGAN together.
    beside: ClassVar[Mapping[str, re.Pattern[str]]] = {"target": BESIDE_TARGET, "vq": BESIDE_VQ}

    def detect(self, path: Path, parts: Parts) -> Found | None:
        """Recognise Meta's, GAIR's, Hugging Face's and Lumina's layouts."""
        return detect(path, parts)

    def from_entry(self, entry: ModelEntry) -> Manifest:
        """Return the manifest of a published model."""
        return published_manifest(entry)

    def build(self, manifest: ChameleonManifest, part: str, ops: TensorOps) -> nn.Module:
        """Build the trunk, its drafter or the VQGAN."""
        if part == "target":
            return ChameleonGPT(manifest.target, ops=ops)
        if part == "drafter":
            assert manifest.drafter is not None
            return ChameleonDrafter(manifest.drafter, ops=ops)
        return ChameleonVQ(manifest.vq)

    def published(self) -> Sequence[ModelEntry]:
        """Return what GAIR, Alpha-VLLM and LANTERN's authors published."""
        from lantern_accel.families.chameleon.published import ENTRIES

        return ENTRIES

    def fitting_drafter(self, manifest: ChameleonManifest) -> ChameleonManifest:
        """Return a manifest with a drafter of one block as the target's are."""
        if manifest.drafter is not None:
            return manifest
        return manifest.model_copy(update={"drafter": fitting_drafter(manifest.target)})

    def tiny(self) -> ChameleonManifest:
        """Return a Lumina: rows end in newlines, and guidance branches have prompts of their own."""
        ids = SpecialIds(
            bos=0, pad=1, eos=2, image_first=4, image_codes=40, image_end=44, image_start=45,
            end_of_turn=46, newline=47, grid=48,
        )  # fmt: skip
        target = ChameleonConfig(
            dim=32, n_layer=2, n_head=4, n_kv_head=2, ffn_dim=48, token_count=64, image_codes=40,
            newline_id=47, height=4, width=4, prefix_length=8, swin_norm=True,
        )  # fmt: skip
        vq = chameleon_vq_config(
            ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=40, codebook_dim=4
        )
        return ChameleonManifest(
            name="tiny-chameleon",
            variant="lumina",
            side=4,
            ids=ids,
            target=target,
            drafter=fitting_drafter(target),
            vq=vq,
            defaults=DEFAULTS["lumina"].within(target.vocab_size),
        )

    def tiny_conditions(self, model: Model, count: int, seed: int) -> Conditions:
        """Return prompts of random words and lengths."""
        manifest: ChameleonManifest = model.manifest
        ids, target = manifest.ids, manifest.target
        drawn = random.Random(seed)
        texts = [
            [
                ids.bos,
                *(drawn.randrange(50, 64) for _ in range(drawn.randint(1, 3))),
                ids.end_of_turn,
                *lumina_unconditional(ids, target.height, target.width),
            ]
            for _ in range(count)
        ]
        shape = (target.prefix_length, target.height, target.width)
        return Conditions(*left_pad(texts, target.prefix_length, ids.pad), shape)

    def recipes(
        self, part: str, checkpoint: Checkpoint, manifest: ChameleonManifest
    ) -> Mapping[str, Recipe]:
        """Rename, stack, and permute what rotations of the other pairing need."""
        if part == "target":
            return target_recipes(checkpoint, checkpoint.shape, manifest.target)
        if part == "drafter":
            assert manifest.drafter is not None
            return drafter_recipes(checkpoint, checkpoint.shape, manifest.drafter)
        within = any(key.startswith(VQ_PREFIX) for key in checkpoint)
        prefix = VQ_PREFIX if within else ""
        return {
            key.removeprefix(prefix): Recipe((key,)) for key in checkpoint if key.startswith(prefix)
        }

    def tokens(self, model: Model, codes: Tensor) -> Tensor:
        """End every row with the newline, where the model writes it."""
        newline = model.manifest.target.newline
        return (codes if newline is None else F.pad(codes, (0, 1), value=newline)).flatten(1)

    def fresh_drafter(
        self, target: ChameleonGPT, layers: int = 1, taps: Sequence[int] = ()
    ) -> ChameleonDrafter:
        """Return one block as the target's are."""
        if layers != 1 or taps:
            raise ModelError(
                f"drafters of the family {self.name!r} have one block and read the target's last states; "
                "leave n_layer and taps out"
            )
        drafter = ChameleonDrafter(fitting_drafter(target.config))
        start_drafter(drafter, target.tok_embeddings.weight)
        return drafter.train()

    def drafter_files(self, drafter: ChameleonDrafter) -> DrafterFiles:
        """Return LANTERN's keys and configuration."""
        weights = published_drafter(drafter.state_dict(), drafter.config)
        return DrafterFiles(weights, "config.json", drafter_said(drafter.config))

    def with_drafter(
        self, manifest: ChameleonManifest, path: Path
    ) -> tuple[ChameleonManifest, Path]:
        """Take LANTERN's drafter, or one that was trained here."""
        weights = drafter_weights(path)
        config = drafter_config(open_checkpoint(weights), weights, manifest.target)
        return manifest.model_copy(update={"drafter": config}), weights

    def positions(self, target: ChameleonConfig) -> int:
        """Return the trained positions: whatever a file says, those of its own picture and a prompt."""
        return max(target.max_positions, target.num_tokens + LONG_PROMPT)

    def fitted(self, model: Model, shape: Hashable) -> tuple[Any, Any]:
        """Return target and drafter for a prompt length and a picture size; weights are shared."""
        if not isinstance(shape, tuple):
            return model.target, model.drafter
        drafter = None if model.drafter is None else model.drafter.fitted(*shape)
        return model.target.fitted(*shape), drafter

    def rows(self, model: Model, conditions: Conditions, sampling: Sampling) -> Rows:
        """Return ``[cond; uncond]``, or ``[cond; image only; uncond]`` for three-way guidance."""
        manifest: ChameleonManifest = model.manifest
        condition, mask = conditions.condition, conditions.mask
        if sampling.branches == 1:
            return Rows(condition, mask)
        ids, length = manifest.ids, condition.shape[1]
        contexts: list[list[int]] = []
        if manifest.variant == "lumina":
            if sampling.branches == 3:
                raise RequestError(
                    f"the model {manifest.name!r} has two-way guidance; leave cfg_scale_image out"
                )
            assert isinstance(conditions.shape, tuple)
            _, rows, columns = conditions.shape
            contexts = [lumina_unconditional(ids, rows, columns)] * len(condition)
        else:
            if sampling.branches == 3:
                prompts = zip(condition, mask, strict=True)
                contexts = [anole_image_only(ids, row[seen].tolist()) for row, seen in prompts]
            contexts += [anole_unconditional(ids)] * len(condition)
        others, seen = left_pad(contexts, length, ids.pad)
        others, seen = others.to(condition.device), seen.to(mask.device)
        return Rows(torch.cat((condition, others)), torch.cat((mask, seen)))

    def pixels(self, model: Model, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode codes in float32, by Chameleon's rule of rounding; newlines are dropped."""
        c = model.manifest.target
        rows, columns = shape[1:] if isinstance(shape, tuple) else (c.height, c.width)
        codes = tokens.view(len(tokens), rows, -1)[:, :, :columns]
        parts = torch.split(codes, self.pixels_together(model))
        drawn = (finite_pixels(model.vq.decode_codes(p)) for p in parts)
        return torch.cat([chameleon_pixels_to_uint8(one) for one in drawn])

    def pixels_together(self, model: Model) -> int:
        """Bound the decoder's activations, which would take more than decoding the tokens did."""
        own: int = (model.manifest.target.height * model.vq.config.downsample) ** 2
        return max(1, PIXELS_AT_ONCE // own)

    def codebook(self, model: Model) -> tuple[Tensor, bool]:
        """Return the raw rows, which is what the decoder reads."""
        return model.vq.quantize.embedding.weight, False
