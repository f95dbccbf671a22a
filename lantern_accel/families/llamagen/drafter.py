"""The EAGLE drafter: decoder blocks, one as published, on (next token's embedding, target feature).

Source: EAGLE (arXiv 2401.15077) as published for LlamaGen by jadohu/LANTERN: no norm before
attention in the first block, no final norm; the target's head reads its output. Drafter position
``p`` consumes the target feature at ``p`` and token ``p + 1``, so its table has one prefix row fewer
than the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import DraftStack
from lantern_accel.nn.fusion import Fusion, check_taps
from lantern_accel.nn.sizes import Sizes
from lantern_accel.nn.transformer import (
    REFERENCE,
    Block,
    Pass,
    PrefixRotary,
    RMSNorm,
    dense_visible,
    described,
    grid_tables,
)


class DrafterConfig(Sizes):
    """Sizes of an EAGLE drafter for a LlamaGen target."""

    dim: int = Field(ge=4)
    n_layer: int = Field(1, ge=1, description="blocks; the published drafters have one")
    taps: tuple[int, ...] = Field(
        (),
        description="blocks of the target, counted from 1, whose states are read beside its last ones "
        "(EAGLE-3, arXiv 2503.01840)",
    )
    n_head: int = Field(ge=1)
    ffn_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    grid: int = Field(ge=1)
    prefix_length: int = Field(ge=0, description="the target's prefix length less one")
    norm_eps: float = 1e-6
    bias: bool = True
    rope_base: float = 10000.0
    prefix_rotary: PrefixRotary = Field("zero", description="LlamaGen: zero, prompt scores are 0")
    mask_padding: bool = Field(
        True, description="hide the caption's pads; the published drafters were trained seeing them"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> DrafterConfig:
        if self.dim % self.n_head or (self.dim // self.n_head) % 4:
            raise ValueError(
                f"dim {self.dim} must be n_head {self.n_head} times a head width that is a multiple of "
                "4 (2D rotary positions)"
            )
        check_taps(self.taps)
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head


@torch.no_grad()
def start_drafter(drafter: Any, embedding: Tensor) -> None:
    """Draw a drafter's first weights; its table becomes the target's ``embedding`` and is frozen."""
    drafter.start()
    drafter.embed_tokens.weight.copy_(embedding)
    drafter.embed_tokens.requires_grad_(False)


class EagleDrafter(Fusion):
    """Predicts the target's next feature from its last features and the token drawn from them."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: DrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.make_fusion()
        self.layers = nn.ModuleList(
            [
                Block(
                    config.dim,
                    config.n_head,
                    config.ffn_dim,
                    config.norm_eps,
                    input_norm=layer > 0,
                )
                for layer in range(config.n_layer)
            ]
        )
        self.register_buffer("rope_cos", None, persistent=False)
        self.register_buffer("rope_sin", None, persistent=False)
        self.place_tables(torch.get_default_device())

    def place_tables(self, device: torch.device) -> None:
        """Make the rotary tables on ``device``, in float32 whatever the weights' dtype."""
        self.rope_cos, self.rope_sin = grid_tables(self.config, device)

    @property
    def stack(self) -> DraftStack | None:
        """All that a pass runs; None where its blocks are of another kind."""
        blocks = described(self.layers)
        if blocks is None:
            return None
        norms = tuple(norm.described() for norm in self.tap_norms if isinstance(norm, RMSNorm))
        fuse = None if self.fuse is None else self.fuse.described()
        return DraftStack(self.embed_tokens.weight, norms, fuse, self.fc.described(), blocks)

    def forward(self, codes: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Predict features ``[R, T, D]`` from codes, int ``[R, T]``, and features ``[R, T, D]``.

        Of a drafter with taps, features of the target are ``[R, T, (taps + 1) D]``.
        """
        x = self.joined(F.embedding(codes, self.embed_tokens.weight), features)
        return self.ops.trunk(self.layers, x, at)

    def forward_prefix(self, condition: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Run the prompt with the target's features ``[R, p, D]``; every position is fed code 0."""
        codes = torch.zeros(features.shape[:2], dtype=self.ops.index, device=features.device)
        return self.forward(codes, features, at)

    def forward_dense(
        self, codes: Tensor, features: Tensor, prefix_mask: Tensor | None = None
    ) -> Tensor:
        """Run a whole sequence without a cache; ``prefix_mask`` bool ``[R, prefix_length]``."""
        length = codes.shape[1]
        mask = None
        if prefix_mask is not None:
            mask = self.ops.mask(dense_visible(prefix_mask, length), features.dtype)
        cos = self.rope_cos[:length].view(1, length, 1, -1)
        sin = self.rope_sin[:length].view(1, length, 1, -1)
        out: Tensor = self(codes, features, Pass(cos, sin, mask))
        return out

    def forward_image(
        self,
        condition: Tensor | None,
        codes: Tensor,
        features: Tensor,
        prefix_mask: Tensor | None = None,
    ) -> Tensor:
        """Run prompt and picture as training does: codes ``[R, n]``, features ``[R, p - 1 + n, D]``.

        ``p``: the target's prefix. Of ``condition`` nothing is read: prompts are fed code 0.
        ``prefix_mask``: bool ``[R, p - 1]``.
        """
        fed = F.pad(codes, (self.config.prefix_length, 0))
        return self.forward_dense(fed, features, prefix_mask)
