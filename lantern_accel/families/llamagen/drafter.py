"""The EAGLE drafter of LlamaGen: decoder blocks, one as published.

Source: jadohu/LANTERN: no norm before attention in the first block, no final norm; the target's head
reads its output. Its rotary tables have one prefix row fewer than the target's.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import DraftStack
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.nn.decoder import Decoder
from lantern_accel.nn.drafter import EagleDrafter, EagleSizes
from lantern_accel.nn.rotary import GridNetwork
from lantern_accel.nn.sizes import GridSizes
from lantern_accel.nn.transformer import REFERENCE, RMSNorm, plan_blocks


class DrafterConfig(EagleSizes, GridSizes):
    """Sizes of an EAGLE drafter for a LlamaGen target."""

    same = ("dim", "vocab_size", "grid", "prefix_length")
    ffn_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    grid: int = Field(ge=1)
    prefix_length: int = Field(ge=0, description="the target's prefix length less one")
    norm_eps: float = 1e-6

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, input_norm=False)

    @classmethod
    def of_target(cls, target: LlamaGenConfig) -> dict[str, object]:
        own = {"ffn_dim": target.hidden_dim, "prefix_length": target.prefix_length - 1}
        return super().of_target(target) | own


class LlamaGenDrafter(GridNetwork, EagleDrafter):
    """The drafter of a LlamaGen target, with a table of codes of its own."""

    sizes = DrafterConfig
    config: DrafterConfig

    def __init__(self, config: DrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.make_layers()
        self.place_tables(self.embed_tokens.weight.device)

    @property
    def stack(self) -> DraftStack | None:
        blocks = plan_blocks(self.layers)
        if blocks is None:
            return None
        norms = tuple(norm.to_plan() for norm in self.tap_norms if isinstance(norm, RMSNorm))
        fuse = None if self.fuse is None else self.fuse.to_plan()
        return DraftStack(self.embed_tokens.weight, norms, fuse, self.fc.to_plan(), blocks)

    def embed(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self.embed_tokens.weight)

    def embed_prompt(self, condition: Tensor | None, features: Tensor, length: int) -> Tensor:
        """Embed code 0 for every position: nothing of the condition is read."""
        shape = (features.shape[0], length)
        return self.embed(torch.zeros(shape, dtype=self.ops.index, device=features.device))
