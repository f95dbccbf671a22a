"""Janus as a family: a Llama that generates 576 tokens of LlamaGen's codebook."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import torch

from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.families.base import Conditions, Model, Rows, check_two_way
from lantern_accel.families.image_tokenizer import VQFamily
from lantern_accel.families.janus import official
from lantern_accel.families.janus.model import DEFAULTS, JanusConfig, JanusGPT, JanusManifest
from lantern_accel.families.janus.text import ROLES, JanusIds, prompt_text
from lantern_accel.families.keys import Change, to_adjacent
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_drafter import PromptedDrafterConfig
from lantern_accel.families.prompted_family import PromptedFamily
from lantern_accel.families.tokenizer import PromptText
from lantern_accel.nn.vq import VQConfig, VQModel
from lantern_accel.strategy.values import Sampling


class JanusText(PromptText[JanusManifest]):
    """The tokenizer of one model; its prompts name no size."""

    def marks(self) -> Sequence[str]:
        return [role for role in ROLES[self.manifest.variant] if role.startswith("<")]

    def prompts(self, texts: Sequence[str], rows: int = 0, columns: int = 0) -> list[list[int]]:
        bos, variant = self.manifest.ids.bos, self.manifest.variant
        encoded = (self.words(prompt_text(text, variant)) for text in texts)
        return [[bos, *(i for i in one if i != bos)] for one in encoded]


class JanusFamily(VQFamily[JanusManifest], PromptedFamily[JanusManifest]):
    """Janus-Pro and Janus 1.3B, the half that generates."""

    name: ClassVar[str] = "janus"
    manifest_type: ClassVar[type[Manifest]] = JanusManifest
    text_type, target_type, vq_type = JanusText, JanusGPT, VQModel
    #: One file holds all parts, and a half that reads images.
    beside = official.SIDE_FILES
    rules = official.RULES
    detect = staticmethod(official.detect)
    from_entry = staticmethod(official.published_manifest)
    shape_names = ("prefix_length",)
    pixels_at_once: ClassVar[int] = 384 * 384

    def changes(
        self, part: str, checkpoint: Checkpoint, manifest: JanusManifest
    ) -> Sequence[Change]:
        return (to_adjacent(manifest.target.head_dim),) if part == "target" else ()

    def rows(self, model: Model[JanusManifest], conditions: Conditions, sampling: Sampling) -> Rows:
        """Return ``[cond; uncond]``: of the prompt without text the ends alone stay, the rest are pads.

        Those pads are tokens like any other: the rows share a mask, which hides what left-pads both.
        """
        condition, mask = conditions.condition, conditions.mask
        if sampling.branches == 1:
            return Rows(condition, mask)
        check_two_way(model, sampling)
        places = torch.arange(mask.shape[1], device=mask.device)
        first = mask.shape[1] - mask.sum(dim=1, keepdim=True)
        ends = (places == first) | (places == mask.shape[1] - 1)
        other = torch.where(ends, condition, model.manifest.ids.pad)
        return Rows(torch.cat((condition, other)), mask)

    def tiny(self) -> JanusManifest:
        """Return a small Janus: rows without a prompt attend to their pads, the drafter has a tap."""
        target = JanusConfig(
            dim=32, n_layer=2, n_head=4, ffn_dim=48, token_count=40, vocab_size=48, code_dim=4,
            grid=5, prefix_length=8, max_positions=64,
        )  # fmt: skip
        return JanusManifest(
            name="tiny-janus",
            ids=JanusIds(bos=36, pad=37, image_start=38),
            target=target,
            drafter=PromptedDrafterConfig.fitting(target, taps=(1,)),
            vq=VQConfig(ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=48, codebook_dim=4),
            defaults=DEFAULTS.within(target.vocab_size),
        )

    def tiny_prompt(self, manifest: JanusManifest, rng: random.Random) -> list[int]:
        words = [rng.randrange(36) for _ in range(rng.randint(1, 6))]
        return [manifest.ids.bos, *words, manifest.ids.image_start]
