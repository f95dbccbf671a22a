"""Emu3's decoder, the drafter of its own blocks, its image sizes and its manifest.

Source: baaivision/Emu3 f6ea9aa (arXiv 2409.18869) and baaivision/Emu3.5 8fcf1da (arXiv 2510.26583). A
Llama that writes an image's codes row by row, each row with an end of its own, in the vocabulary of its
text: Chameleon's arrangement, without norms of queries and keys in Emu3, with norms by a root mean square
in Emu3.5. What follows the last row is known beforehand and is not computed: the ends of frame, image
and text, and in Emu3.5 the image's end in place of the last row's (:meth:`Emu3Manifest.ids_of`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from lantern_accel.errors import RequestError
from lantern_accel.families.chameleon.model import ChameleonConfig, CodeNetwork
from lantern_accel.families.emu3.text import Emu3Ids, Variant
from lantern_accel.families.prompted_drafter import PromptedDrafter, PromptedManifest
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.movq import MoVQConfig
from lantern_accel.nn.transformer import Decoder
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import Sampling


class Emu3Config(ChameleonConfig):
    """Sizes of the decoder; the defaults are Emu3-Gen's."""

    n_kv_head: int = Field(8, ge=0)
    ffn_dim: int = Field(14336, ge=1)
    rope_base: float = 1e6
    token_count: int = Field(184622, ge=2, description="the vocabulary of text and image tokens")
    image_first: int = Field(151854, ge=0, description="the id of code 0")
    image_codes: int = Field(32768, ge=2)
    newline_id: int = Field(151846, description="the token that ends every row of the image")
    height: int = Field(90, ge=1)
    width: int = Field(90, ge=1)
    max_positions: int = Field(9216, ge=2, description="prompt and image, as trained")
    head_norm: bool = Field(False, description="queries and keys are normalised, as Emu3.5's")

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, head_norm="rms" if self.head_norm else "none")


class Emu3Drafter(PromptedDrafter):
    """The drafter of one target, whose one table it reads by token id."""

    #: Left padding has no position, as in the target.
    dense_pass = CodeNetwork.dense_pass

    def read(self, target: TrunkTarget) -> None:
        super().read(target)
        self.codes = target.tok_embeddings.code_ids

    def embed(self, codes: Tensor) -> Tensor:
        ids = self.codes.index_select(0, codes.flatten()).view(codes.shape)
        return F.embedding(ids, self.words)


#: ``image_generation.py`` and Emu3.5's ``configs/``: what they filter is codes alone.
DEFAULTS: dict[Variant, ModelDefaults] = {
    "emu3": ModelDefaults(sampling=Sampling(cfg_scale=3.0, top_k=2048)),
    "emu3.5": ModelDefaults(sampling=Sampling(cfg_scale=5.0, top_k=5120)),
}
#: Emu3.5's sizes in tokens, the height first; its usual one is the first. Emu3's are ratios at one area.
SIZES_3P5 = ((55, 73), (41, 97), (47, 85), (52, 78), (64, 64), (73, 55), (85, 47), (78, 52))
RATIOS = ("1:1", "4:3", "3:4", "16:9", "9:16", "3:2", "2:3", "21:9")


def grid_of(ratio: str, area: int, pixels: int = 8) -> tuple[int, int]:
    """Return rows and columns of an image of ``area`` pixels whose sides are as "width:height".

    ``pixels``: along the side of a token. Halves are rounded to the even number, as in the source. Raises
    :class:`RequestError` for what is not a ratio, or one so narrow that a side has no token.
    """
    sides = [int(part) if part.isdecimal() and part.isascii() else 0 for part in ratio.split(":")]
    if len(sides) == 2 and all(0 < side < 10**6 for side in sides):
        scale = math.sqrt(area / (sides[0] * sides[1])) / pixels
        rows, columns = round(sides[1] * scale), round(sides[0] * scale)
        if rows and columns:
            return rows, columns
    raise RequestError(
        f"the ratio {ratio[:40]!r} gives no image of {area} pixels; write WIDTH:HEIGHT, such as 16:9"
    )


class Emu3Manifest(PromptedManifest):
    """``model.json`` of Emu3's family.

    ``area``: pixels of the model's images; ``tied``: the head is the embedding.
    """

    family: Literal["emu3"] = "emu3"
    variant: Variant = "emu3"
    area: int = Field(518400, ge=1)
    tied: bool = False
    ids: Emu3Ids = Emu3Ids()
    target: Emu3Config
    #: The plain one first: it takes no field of the other's.
    vq: VQConfig | MoVQConfig = Field(union_mode="left_to_right")

    @model_validator(mode="after")
    def _ids_are_of_the_target(self) -> Self:
        t, ids = self.target, self.ids
        if (t.image_first, t.newline_id) != (ids.first, ids.row_end):
            raise ValueError(
                f"codes begin at {t.image_first} and rows end in {t.newline_id}, but by the vocabulary "
                f"at {ids.first} and in {ids.row_end}"
            )
        return self

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return rows and columns of an image ``(width, height)`` in pixels; None: the usual one.

        Raises :class:`RequestError` for sides that tokens do not divide, and for more tokens than the
        model was trained on.
        """
        if size is None:
            return super().grid(None)
        (width, height), side = size, self.token_pixels
        rows, columns = height // side, width // side
        tokens, most = rows * (columns + 1), self.target.max_positions
        if (columns * side, rows * side) != size or not 0 < tokens < most:
            known = ", ".join(f"{w * side}x{h * side}" for h, w in self.sizes())
            raise RequestError(
                f"the model {self.name!r} cannot make {width}x{height} pixels: sides are multiples of "
                f"{side}, with fewer than {most} tokens; it was trained on {known}",
                field="size",
            )
        return rows, columns

    def sizes(self) -> list[tuple[int, int]]:
        """Return rows and columns of the sizes that the model was trained on, the usual one first."""
        if self.variant == "emu3.5":
            return list(SIZES_3P5)
        return [grid_of(ratio, self.area, self.token_pixels) for ratio in RATIOS]

    def ids_of(self, tokens: Tensor) -> Tensor:
        """Return the ids, int64 ``[n, N]``, that the official program writes for ``tokens``."""
        ids, table = self.ids, torch.tensor(self.target.token_ids())
        out = table[tokens.long().cpu()]
        if self.variant == "emu3.5":
            out[:, -1] = ids.image_end
            return out
        ends = torch.tensor([ids.frame_end, ids.image_end, ids.eos])
        return torch.cat((out, ends.expand(len(out), -1)), dim=1)
