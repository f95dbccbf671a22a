"""GLM-Image's prior, a GLM-4 that writes a small and a large grid of visual tokens, and its manifest.

Source: transformers 5.23, ``models/glm_image/modeling_glm_image.py``. Codes are the vocabulary's first
ids. The head has rows of further ids, an end marker among them: filters count these, as transformers
does, and none is ever sampled. Half of each head turns, by three positions in sections. With left padding
all positions count the pads: what attention sees is how far positions are apart.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import RequestError
from lantern_accel.families.glm_image.grids import PIXELS, SMALL, Grid, grid_of, grids, positions
from lantern_accel.families.manifest import TokenIds
from lantern_accel.families.prompted_drafter import PromptedManifest
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.rotary import rotary_table
from lantern_accel.nn.sizes import LlamaSizes, Sizes
from lantern_accel.nn.transformer import REFERENCE, Decoder, Projection
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import Sampling


class GlmImageConfig(LlamaSizes):
    """Sizes of the prior; ``height`` and ``width`` are of the large grid."""

    n_layer: int = Field(40, ge=1)
    n_kv_head: int = Field(2, ge=1)
    ffn_dim: int = Field(13696, ge=1)
    token_count: int = Field(168064, ge=2, description="the vocabulary of codes and text")
    vocab_size: int = Field(16384, ge=2, description="codes, the first ids of the vocabulary")
    head_rows: int = Field(16512, ge=2, description="ids that the head has logits of, codes first")
    rotated: int = Field(64, ge=2, description="numbers of a head that turn, the first ones")
    sections: tuple[int, ...] = Field((8, 12, 12), description="pairs of each axis, in turns")
    bias: bool = Field(True, description="queries, keys and values have one")
    height: int = Field(32, ge=1)
    width: int = Field(32, ge=1)
    small_tokens: int = Field(SMALL, ge=1, description="tokens of the small grid, about")
    max_positions: int = Field(131072, ge=2)
    newline: ClassVar[None] = None

    @model_validator(mode="after")
    def _sizes_fit(self) -> GlmImageConfig:
        if self.rotated % 2 or self.rotated > self.head_dim:
            raise ValueError(
                f"{self.rotated} numbers of a head of {self.head_dim} cannot turn in pairs"
            )
        if sum(self.sections) != self.rotated // 2:
            raise ValueError(
                f"sections {list(self.sections)} are not the {self.rotated // 2} pairs that turn"
            )
        if not self.vocab_size <= self.head_rows <= self.token_count:
            raise ValueError(
                f"{self.vocab_size} codes, {self.head_rows} rows of the head and {self.token_count} "
                "tokens do not lie in each other"
            )
        if min(self.grids[0]) < 1:
            raise ValueError(f"an image of {self.height} x {self.width} tokens is too narrow")
        return self

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, bias=self.bias, norms="both")

    @property
    def grids(self) -> tuple[Grid, Grid]:
        """Rows and columns of the small and of the large grid."""
        return grids(self.height, self.width, self.small_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of both grids."""
        return sum(rows * columns for rows, columns in self.grids)

    @property
    def row_tokens(self) -> int:
        """Tokens of the wider grid's rows; :attr:`above` is exact."""
        return max(columns for _, columns in self.grids)

    @property
    def above(self) -> list[int]:
        """The token above each in its own grid, -1 in the first rows."""
        above: list[int] = []
        for high, wide in self.grids:
            above += [-1] * wide + list(range(len(above), len(above) + (high - 1) * wide))
        return above


class GlmImageGPT(TrunkTarget):
    """The target model."""

    config: GlmImageConfig

    def __init__(self, config: GlmImageConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.tok_embeddings = nn.Embedding(config.token_count, config.dim)
        self.make_layers()
        self.output = Projection(config.dim, config.head_rows, bias=False)
        self.unsampled = config.head_rows - config.vocab_size
        self.place_tables(self.output.weight.device)

    def all_logits(self, features: Tensor) -> Tensor:
        return super().head(features)

    def head(self, features: Tensor) -> Tensor:
        return self.all_logits(features)[..., : self.config.vocab_size]

    def rotary_rows(self, prefix: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        c = self.config
        with torch.device("cpu"):
            places = positions(prefix, c.grids)[:, : prefix + count]
        return rotary_table(
            places, c.head_dim, c.rope_base, device, rotated=c.rotated, sections=c.sections,
            frequencies=self.frequencies,
        )  # fmt: skip


class CodebookConfig(Sizes):
    """Sizes of the codebook that tokens were trained with; a token stands for 32 x 32 pixels."""

    codebook_size: int = Field(16384, ge=2)
    codebook_dim: int = Field(2048, ge=1)


class Codebook(nn.Module):
    """The rows that say which codes are alike; the diffusion decoder has a table of its own."""

    def __init__(self, config: CodebookConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)


#: The released generation_config.json; its top-k is the head's width and filters nothing.
DEFAULTS = ModelDefaults(sampling=Sampling(temperature=0.9, top_p=0.75))
#: More tokens than this have no noise of their own.
MOST_TOKENS = 65535


class Marks(TokenIds):
    """The tokenizer's strings around an image's size and before the image, and what pads prompts."""

    size_begin: str = "<sop>"
    size_end: str = "<eop>"
    image_start: str = "<|dit_token_16384|>"
    pad: int = Field(16385, ge=0)


class GlmImageManifest(PromptedManifest):
    """``model.json`` of GLM-Image's family."""

    family: Literal["glm_image"] = "glm_image"
    ids: Marks = Marks()
    target: GlmImageConfig
    vq: CodebookConfig

    @property
    def token_pixels(self) -> int:
        return PIXELS

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return rows and columns of the large grid of an image ``(width, height)`` in pixels.

        None: the default size. Raises :class:`RequestError` for a size that the model cannot generate.
        """
        if size is None:
            return super().grid(None)
        width, height = size
        rows, columns = grid_of(width, height, f"the model {self.name!r}")
        both = grids(rows, columns, self.target.small_tokens)
        most = min(self.target.max_positions, MOST_TOKENS)
        if min(both[0]) < 1 or sum(a * b for a, b in both) > most:
            raise RequestError(
                f"the model {self.name!r} cannot generate {width}x{height} pixels: "
                f"{'it is too narrow' if min(both[0]) < 1 else f'it has more than {most} tokens'}; "
                "choose a size such as 1024x1024",
                field="size",
            )
        return rows, columns
