"""Chameleon as a family: Anole and Lumina-mGPT, text and images in one vocabulary."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.families.base import Conditions, Model, Rows, check_two_way
from lantern_accel.families.chameleon import layouts, official
from lantern_accel.families.chameleon.model import (
    DEFAULTS,
    ChameleonConfig,
    ChameleonDrafter,
    ChameleonDrafterConfig,
    ChameleonGPT,
    ChameleonManifest,
)
from lantern_accel.families.chameleon.text import NAMES, ChameleonIds, anole_image_only
from lantern_accel.families.image_tokenizer import VQFamily
from lantern_accel.families.keys import Change
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_family import TokenFamily
from lantern_accel.families.tokenizer import PromptText
from lantern_accel.nn.vq import VQModel
from lantern_accel.strategy.values import Sampling


class ChameleonText(PromptText[ChameleonManifest]):
    """The tokenizer of one model, with the prompt that it was trained on."""

    names: ClassVar[Mapping[str, str]] = NAMES

    def get_token_ids(self) -> Mapping[str, int]:
        ids = self.manifest.ids.model_dump()
        return {name: ids[field] for field, name in self.names.items()}

    def format_prompts(self, texts: Sequence[str], rows: int, columns: int) -> Sequence[str]:
        """Return what the model reads of each text: a Lumina's names the size, the width first."""
        if self.manifest.variant == "anole":
            return texts
        size = "x".join(str(side * self.manifest.vq.downsample) for side in (columns, rows))
        before = f"Generate an image of {size} according to the following prompt:\n"
        return [f"{before}{text}" for text in texts]

    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        """Return begin, the text, end of turn, and what starts the image.

        A Lumina would choose the size tokens itself, from the size that the text names; they are given
        here (as LANTERN's parallel mode does), so that the grammar of what follows is known.
        """
        ids, start = self.manifest.ids, self.manifest.start(rows, columns)
        said = self.format_prompts(texts, rows, columns)
        return [[ids.bos, *self.words(text), ids.end_of_turn, *start] for text in said]


class ChameleonFamily(VQFamily[ChameleonManifest], TokenFamily[ChameleonManifest]):
    """Anole-7B and Lumina-mGPT-7B, and what else shares their trunk and vocabulary."""

    name: ClassVar[str] = "chameleon"
    manifest_type: ClassVar[type[Manifest]] = ChameleonManifest
    text_type, target_type, drafter_type = ChameleonText, ChameleonGPT, ChameleonDrafter
    #: Attention is in its middle alone.
    vq_type = staticmethod(functools.partial(VQModel, attend=()))
    detect = staticmethod(official.detect)
    from_entry = staticmethod(official.published_manifest)
    drafters_near = staticmethod(official.drafters_near)
    published_drafter = staticmethod(official.published_drafter)
    pixels_at_once: ClassVar[int] = 512 * 512
    long_prompt = 256
    #: Hugging Face's files hold target and VQGAN together.
    beside, vq_prefix, rules = layouts.SIDE_FILES, layouts.VQ_PREFIX, layouts.BOTH_RULES

    def tiny(self) -> ChameleonManifest:
        """Return a Lumina: rows end in newlines, and guidance branches have prompts of their own."""
        ids = ChameleonIds(
            bos=0, pad=1, eos=2, image_first=4, image_codes=40, image_end=44, image_start=45,
            end_of_turn=46, newline=47, grid=48,
        )  # fmt: skip
        target = ChameleonConfig(
            dim=32, n_layer=2, n_head=4, n_kv_head=2, ffn_dim=48, token_count=64, image_codes=40,
            newline_id=47, height=4, width=4, prefix_length=8, swin_norm=True,
        )  # fmt: skip
        vq = layouts.chameleon_vq_config(
            ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=40, codebook_dim=4
        )
        return ChameleonManifest(
            name="tiny-chameleon",
            variant="lumina",
            side=4,
            ids=ids,
            target=target,
            drafter=ChameleonDrafterConfig.fitting(target),
            vq=vq,
            defaults=DEFAULTS["lumina"].within(target.vocab_size),
        )

    def tiny_prompt(self, manifest: ChameleonManifest, rng: random.Random) -> list[int]:
        ids, target = manifest.ids, manifest.target
        words = [rng.randrange(50, 64) for _ in range(rng.randint(1, 3))]
        return [ids.bos, *words, ids.end_of_turn, *manifest.start(target.height, target.width)]

    def changes(
        self, part: str, checkpoint: Checkpoint, manifest: ChameleonManifest
    ) -> Sequence[Change]:
        """Permute what rotations of the other pairing need; keep the head's rows of codes."""
        config = manifest.drafter if part == "drafter" else manifest.target
        return () if part == "vq" or not config else layouts.trunk_changes(checkpoint, config)

    def rows(
        self, model: Model[ChameleonManifest], conditions: Conditions, sampling: Sampling
    ) -> Rows:
        """Return ``[cond; uncond]``, or ``[cond; image only; uncond]`` for three-way guidance."""
        manifest = model.manifest
        condition, mask = conditions.condition, conditions.mask
        if sampling.branches == 1:
            return Rows(condition, mask)
        contexts: list[list[int]] = []
        if manifest.variant == "lumina":
            check_two_way(model, sampling)
            assert isinstance(conditions.shape, tuple)
            _, rows, columns = conditions.shape
            contexts = [manifest.start(rows, columns)] * len(condition)
        else:
            if sampling.branches == 3:
                prompts = zip(condition, mask, strict=True)
                contexts = [
                    anole_image_only(manifest.ids, row[seen].tolist()) for row, seen in prompts
                ]
            contexts += [[manifest.ids.bos, *manifest.start()]] * len(condition)
        return self.with_contexts(model, conditions, contexts)
