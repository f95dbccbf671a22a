"""The base of the sizes of every network: a file that asks for the impossible is refused."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lantern_accel.bounds import MOST_CODES, MOST_GRID, MOST_LAYERS
from lantern_accel.errors import show
from lantern_accel.records import Frozen

#: What a prompt's positions have in the tables of a grid.
PrefixRotary = Literal["zero", "identity"]
#: The largest number that a field may have; :data:`MOST_CODES` for all others.
MOST = {
    "n_layer": MOST_LAYERS,
    "num_res_blocks": MOST_LAYERS,
    "ch_mult": MOST_LAYERS,
    "taps": MOST_LAYERS,
    "grid": MOST_GRID,
    "height": MOST_GRID,
    "width": MOST_GRID,
}
#: Entries of a field that is a list, such as the levels of an image tokenizer.
MOST_ENTRIES = 64


class Sizes(Frozen):
    """Sizes of a network, frozen; no field may have numbers that no network has.

    Without bounds a damaged file would have layers built until memory ends.
    """

    @field_validator("*")
    @classmethod
    def _is_possible(cls, value: object, info: ValidationInfo) -> object:
        most = MOST.get(info.field_name or "", MOST_CODES)
        entries = value if isinstance(value, tuple) else (value,)
        if len(entries) > MOST_ENTRIES:
            raise ValueError(f"{len(entries)} entries are more than {MOST_ENTRIES}")
        for one in entries:
            if isinstance(one, int) and not 0 <= one <= most:
                raise ValueError(f"{show(one)} is not between 0 and {most}")
            if isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{one} is not a finite number")
        if isinstance(value, float) and value <= 0:  # a drafter's marks may be below
            raise ValueError(f"{value} is not a number above 0")
        return value


class LlamaSizes(Sizes):
    """Sizes of a Llama-like trunk whose heads may share keys and values."""

    dim: int = Field(4096, ge=4)
    n_layer: int = Field(32, ge=1)
    n_head: int = Field(32, ge=1)
    n_kv_head: int = Field(0, ge=0, description="0: as many as heads")
    head_width: int = Field(0, ge=0, description="0: dim / n_head")
    ffn_dim: int = Field(11008, ge=1)
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    prefix_length: int = Field(64, ge=2, description="positions kept for the prompt, left-padded")

    @model_validator(mode="after")
    def _heads_fit(self) -> LlamaSizes:
        if not self.head_width and self.dim % self.n_head:
            raise ValueError(f"dim {self.dim} must be a multiple of n_head {self.n_head}")
        if self.head_dim % 2:
            raise ValueError(f"heads are {self.head_dim} wide, which must be an even number")
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


class SquareSizes(Sizes):
    """Sizes of a network whose images are square."""

    grid: int = Field(16, ge=1, description="tokens along one side of the image")

    @property
    def height(self) -> int:
        return self.grid

    @property
    def width(self) -> int:
        return self.grid

    @property
    def num_tokens(self) -> int:
        return self.grid * self.grid

    @property
    def row_tokens(self) -> int:
        """Tokens from one position to the one below it."""
        return self.grid

    @property
    def above(self) -> None:
        """None: rows of one grid."""


class GridSizes(SquareSizes):
    """Sizes of a network whose image tokens turn by row and column, as LlamaGen's do."""

    dim: int = Field(ge=4)
    n_head: int = Field(ge=1)
    rope_base: float = 10000.0
    prefix_rotary: PrefixRotary = Field("zero", description="LlamaGen: zero, prompt scores are 0")

    @property
    def kv_heads(self) -> int:
        return self.n_head

    @model_validator(mode="after")
    def _heads_turn(self) -> GridSizes:
        if self.dim % self.n_head or self.head_dim % 4:
            raise ValueError(
                f"dim {self.dim} must be n_head {self.n_head} times a head width that is a multiple of "
                "4 (2D rotary positions)"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head
