"""Emu3 as a family: a plain decoder that writes an image's codes row by row."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.families import keys
from lantern_accel.families.base import Conditions, Model, Rows, check_two_way
from lantern_accel.families.chameleon.layouts import code_changes
from lantern_accel.families.chameleon.model import ChameleonGPT
from lantern_accel.families.emu3 import official
from lantern_accel.families.emu3.model import DEFAULTS, Emu3Config, Emu3Drafter, Emu3Manifest
from lantern_accel.families.emu3.text import (
    BEGIN,
    BOS,
    CODE,
    FRAME,
    PROMPTS,
    SPECIALS,
    UNCONDITIONAL,
    Emu3Ids,
    image_prefix,
    read_either,
)
from lantern_accel.families.image_tokenizer import VQFamily
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_drafter import PromptedDrafterConfig
from lantern_accel.families.prompted_family import PromptedFamily
from lantern_accel.families.tokenizer import PromptText
from lantern_accel.nn.movq import MoVQ, MoVQConfig
from lantern_accel.nn.vq import VQModel
from lantern_accel.strategy.values import Sampling


class Emu3Text(PromptText[Emu3Manifest]):
    """The tokenizer of one model, with the prompt that it was trained on."""

    read = staticmethod(read_either)

    def get_token_ids(self) -> Mapping[str, int]:
        ids = self.manifest.ids
        known = (ids.pad, ids.bos, ids.begin, ids.image, ids.image_start, ids.image_end)
        return dict(zip((SPECIALS[0], BOS, BEGIN, *FRAME), known, strict=True))

    def marks(self) -> Sequence[str]:
        return (*SPECIALS, *FRAME, CODE)

    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        before, behind = PROMPTS[self.manifest.variant]
        start = image_prefix(rows, columns)
        return [self.words(f"{before}{text}{behind}{start}") for text in texts]

    def unconditional(self, rows: int, columns: int) -> list[int]:
        """Return the ids in front of an image of a size without a prompt."""
        return self.words(UNCONDITIONAL[self.manifest.variant] + image_prefix(rows, columns))


class IBQ(VQModel):
    """Emu3.5's tokenizer: a plain VQGAN that gives a place the code of the largest dot product."""

    def nearest_code(self, latents: Tensor) -> Tensor:
        return torch.einsum("bdhw,vd->bhwv", latents, self.codebook()).argmax(dim=-1)


class Emu3Family(VQFamily[Emu3Manifest], PromptedFamily[Emu3Manifest]):
    """Emu3-Gen and Emu3.5-Image."""

    name: ClassVar[str] = "emu3"
    manifest_type: ClassVar[type[Manifest]] = Emu3Manifest
    text_type, target_type, drafter_type = Emu3Text, ChameleonGPT, Emu3Drafter
    detect = staticmethod(official.detect)
    from_entry = staticmethod(official.published_manifest)
    rules, beside, vq_prefix = official.RULES, official.SIDE_FILES, official.IN_TARGET
    #: Activations of the image tokenizer are half a gigabyte for an image.
    pixels_at_once: ClassVar[int] = 720 * 720

    def build(self, manifest: Emu3Manifest, part: str, ops: TensorOps) -> nn.Module:
        if part != "vq":
            return super().build(manifest, part, ops)
        return MoVQ(manifest.vq) if isinstance(manifest.vq, MoVQConfig) else IBQ(manifest.vq)

    def names(self, part: str, checkpoint: Checkpoint, manifest: Emu3Manifest) -> dict[str, str]:
        named = super().names(part, checkpoint, manifest)
        if part == "target" and manifest.tied and "tok_embeddings.weight" in named:
            named.setdefault("output.weight", named["tok_embeddings.weight"])
        return named

    def changes(
        self, part: str, checkpoint: Checkpoint, manifest: Emu3Manifest
    ) -> Sequence[keys.Change]:
        """Permute queries and keys; keep the head's rows of codes and row ends."""
        if part == "vq":  # attention's matrices are convolutions in one layout only
            kernel = r"\.(q|k|v|proj_out)\.weight$"
            return ((kernel, lambda rows: rows.reshape(*rows.shape[:2], 1, 1)),)
        if part != "target":
            return ()
        return code_changes(manifest.target, split=True)

    def rows(self, model: Model[Emu3Manifest], conditions: Conditions, sampling: Sampling) -> Rows:
        """Return ``[cond; uncond]``: without a prompt there are its frame and the same size alone."""
        if sampling.branches == 1:
            return Rows(conditions.condition, conditions.mask)
        check_two_way(model, sampling)
        manifest, text = model.manifest, model.text
        assert isinstance(conditions.shape, tuple)
        _, rows, columns = conditions.shape
        if isinstance(text, Emu3Text):
            context = text.unconditional(rows, columns)
        else:
            context = [manifest.ids.bos, *self._size_prefix(manifest, rows, columns)]
        return self.with_contexts(model, conditions, [context] * len(conditions.mask))

    def tiny(self) -> Emu3Manifest:
        """Return a small model of both: grouped queries, head norms, rows with ends."""
        ids = Emu3Ids.before(216)
        target = Emu3Config(
            dim=32, n_layer=2, n_head=4, n_kv_head=2, head_width=16, ffn_dim=48, token_count=256,
            image_first=216, image_codes=40, newline_id=ids.row_end, height=4, width=4,
            prefix_length=24, max_positions=128, head_norm=True,
        )  # fmt: skip
        return Emu3Manifest(
            name="tiny-emu3",
            area=64,
            ids=ids,
            target=target,
            drafter=PromptedDrafterConfig.fitting(target, taps=(1,)),
            vq=MoVQConfig(
                ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=40, attention=(0,), halvings=1
            ),
            defaults=DEFAULTS["emu3"].within(40),
        )

    def tiny_prompt(self, manifest: Emu3Manifest, rng: random.Random) -> list[int]:
        ids, target = manifest.ids, manifest.target
        words = [rng.randrange(5) for _ in range(rng.randint(2, 4))]
        return [ids.bos, *words, *self._size_prefix(manifest, target.height, target.width)]

    @staticmethod
    def _size_prefix(manifest: Emu3Manifest, rows: int, columns: int) -> list[int]:
        """Return what stands before an image of a model without words, its size as two ids."""
        return [manifest.ids.image_start, rows, columns, manifest.ids.image]
