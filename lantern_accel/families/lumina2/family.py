"""Lumina-mGPT 2.0 as a family: Chameleon's trunk with other ids, another image decoder and guidance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from lantern_accel.families.chameleon import layouts
from lantern_accel.families.chameleon.family import ChameleonFamily, ChameleonText
from lantern_accel.families.chameleon.model import ChameleonDrafterConfig
from lantern_accel.families.lumina2 import official
from lantern_accel.families.lumina2.model import (
    DEFAULTS,
    Lumina2Config,
    Lumina2GPT,
    Lumina2Manifest,
)
from lantern_accel.families.lumina2.text import NAMES, Lumina2Ids, instructions
from lantern_accel.families.manifest import Manifest
from lantern_accel.nn.movq import MoVQ, MoVQConfig
from lantern_accel.nn.vq import nearest_uint8


class Lumina2Text(ChameleonText):
    """The tokenizer of one model, with the prompt that it was trained on."""

    names = NAMES

    def format_prompts(self, texts: Sequence[str], rows: int, columns: int) -> Sequence[str]:
        return instructions(texts, rows, columns)


class Lumina2Family(ChameleonFamily):
    """Lumina-mGPT 2.0, which generates by the same steps as Chameleon's family does."""

    name: ClassVar[str] = "lumina2"
    manifest_type: ClassVar[type[Manifest]] = Lumina2Manifest
    text_type, target_type = Lumina2Text, Lumina2GPT
    vq_type, long_prompt = MoVQ, 0
    detect = staticmethod(official.detect)
    from_entry = staticmethod(official.published_manifest)
    to_uint8 = staticmethod(nearest_uint8)
    #: The image decoder's file is of a training, which may leave more in it.
    beside: ClassVar[dict[str, re.Pattern[str]]] = {
        **layouts.SIDE_FILES,
        "vq": re.compile(r"^(?!(encoder|decoder|quantize|quant_conv|post_quant_conv)\.)"),
    }

    def tiny(self) -> Lumina2Manifest:
        """Return a small model, guided by a falling scale; an image is a unit high and two wide."""
        ids = Lumina2Ids(
            bos=0, pad=0, eos=45, image_first=4, image_codes=40, image_end=45, image_start=44,
            end_of_turn=46, newline=47, grid=48, grids=(48, 49, 50),
        )  # fmt: skip
        target = Lumina2Config(
            dim=32, n_layer=2, n_head=4, ffn_dim=48, token_count=64, image_codes=40, newline_id=47,
            height=4, width=8, prefix_length=8, guidance_floor=2.0,
        )  # fmt: skip
        return Lumina2Manifest(
            name="tiny-lumina2",
            side=8,
            ids=ids,
            target=target,
            drafter=ChameleonDrafterConfig.fitting(target),
            vq=MoVQConfig(ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=40, attention=(0,)),
            defaults=DEFAULTS.within(target.vocab_size),
        )
