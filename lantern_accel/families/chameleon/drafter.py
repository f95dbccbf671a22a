"""The EAGLE drafter for Anole and Lumina-mGPT: one Chameleon block.

Source: jadohu/LANTERN ``models/drafters/cnets_anole.py``. Unlike LlamaGen's drafter it has a norm before
attention and norms of queries and keys, it reads the prompt's own tokens, and its positions are those of
a line of text.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.chameleon.model import (
    ChameleonGPT,
    CodeEmbedding,
    CodeNetwork,
    TrunkConfig,
)
from lantern_accel.nn.drafter import EagleDrafter, EagleSizes
from lantern_accel.nn.transformer import REFERENCE


class ChameleonDrafterConfig(EagleSizes, TrunkConfig):
    """Sizes of a drafter; prompt length, image and codes are its target's."""

    same = ("dim", "token_count", "image_codes", "newline_id")
    n_layer: int = Field(1, ge=1, le=1)
    taps: tuple[int, ...] = Field((), max_length=0, description="they read the last states alone")


class ChameleonDrafter(CodeNetwork, EagleDrafter):
    """The drafter of Anole or Lumina-mGPT, with a table of all tokens of its own."""

    table, sizes = "embed_tokens", ChameleonDrafterConfig
    config: ChameleonDrafterConfig

    def __init__(self, config: ChameleonDrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        # Its own table: the published drafters' embeddings were frozen, but not tied.
        self.embed_tokens = CodeEmbedding(config)
        self.make_layers()
        self.place_tables(torch.device("cpu"))

    def for_target(self, target: ChameleonGPT) -> ChameleonDrafter:
        return self.resize(**target.config.model_dump(include={"prefix_length", "height", "width"}))

    def embed(self, codes: Tensor) -> Tensor:
        out: Tensor = self.embed_tokens(codes)
        return out

    def embed_prompt(self, condition: Tensor | None, features: Tensor, length: int) -> Tensor:
        """Embed the prompt's own tokens behind the first."""
        assert condition is not None
        return self.embed_tokens.tokens(condition[:, 1:])

    def forward_dense(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Run token ids ``[R, n]`` without a cache; ``mask`` bool ``[R, n]``, False at left padding."""
        at = self.dense_pass(mask, ids.shape[1], 0, features)
        return self.run(self.embed_tokens.tokens(ids), features, at)
