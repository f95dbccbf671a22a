"""The base of all families' targets: a described trunk between tables of tokens and a head of codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.decoding.rows import Allowed
from lantern_accel.device.plan import Stack
from lantern_accel.nn.draft_head import DraftHead
from lantern_accel.nn.rotary import RotaryNetwork
from lantern_accel.nn.transformer import Decoder, Pass, Projection, RMSNorm


class TrunkTarget(RotaryNetwork):
    """A target on a described trunk; its features are the states after the final norm.

    A configuration has ``decoder`` and ``prefix_length`` besides what decoding reads. Here a prompt is a
    row of token ids.
    """

    #: Whether rows of one image have prompts, masks and positions of their own, or share them.
    own_prompts = False
    #: Ids behind the codes that filters count and that are never sampled.
    unsampled: int = 0
    #: None where the model has none.
    draft_head: DraftHead | None
    tok_embeddings: Any
    decoder: Decoder
    layers: nn.ModuleList
    norm: RMSNorm
    output: Projection

    def make_layers(self) -> None:
        """Make the blocks, as the configuration describes them, and the final norm."""
        self.draft_head = None
        self.decoder = self.config.decoder
        self.layers = self.decoder.blocks()
        self.norm = RMSNorm(self.decoder.dim, self.decoder.eps)

    @property
    def stack(self) -> Stack | None:
        """The whole model as a fused step takes it; None where it has other parts."""
        return None

    @property
    def weight(self) -> Tensor:
        """The head's matrix, whose dtype and device are the model's."""
        return self.output.weight

    @property
    def code_table(self) -> Tensor:
        """What codes are embedded by: ``[V or more, D]``; the first words are the codes."""
        table: Tensor = self.tok_embeddings.weight
        return table

    def embed_tokens(self, codes: Tensor) -> Tensor:
        """Embed codes, int ``[R, T]``, as ``[R, T, D]``."""
        return F.embedding(codes, self.code_table)

    @property
    def head_layers(self) -> tuple[Projection, ...]:
        """The layers of the head, a GELU between each two."""
        return (self.output,)

    def head(self, features: Tensor) -> Tensor:
        """Return float32 logits of codes ``[..., V]`` of features ``[..., D]``."""
        *before, last = self.head_layers
        x = features
        for layer in before:
            x = F.gelu(layer(x, self.ops))
        return last.logits(x, self.ops)

    def all_logits(self, features: Tensor) -> Tensor:
        """Return float32 logits ``[..., V + undrawn]`` of features ``[..., D]``, codes first."""
        return self.head(features)

    def guidance_scales(self, cfg_scale: float) -> list[float] | None:
        """Return the scale with which each token is guided; None: the same for all."""
        return None

    def allowed_codes(self) -> Allowed | None:
        """Return which codes each image token may be; None: any."""
        return None

    def condition_buffer(self, rows: int) -> Tensor:
        shape = (rows, self.config.prefix_length)
        return torch.zeros(shape, dtype=self.ops.index, device=self.output.weight.device)

    def forward(self, x: Tensor, at: Pass, taps: Sequence[int] = ()) -> Tensor:
        """Run all blocks and the final norm on embeddings ``[R, T, D]``; same shape out.

        ``taps``: blocks, counted from 1, whose states come before the features: ``[R, T, (n + 1) D]``.
        """
        return self.decoder.run(self.ops, self.layers, x, at, self.norm, taps)

    def embed_prefix(self, condition: Tensor) -> Tensor:
        """Embed the prompt's token ids, int ``[R, prefix]``, as ``[R, prefix, D]``."""
        return F.embedding(condition, self.tok_embeddings.weight)

    def forward_dense(
        self,
        condition: Tensor,
        codes: Tensor,
        prefix_mask: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Tensor:
        """Run prompt and codes ``[R, n]`` in one pass without a cache: features ``[R, p+n, D]``.

        ``condition``: as :meth:`embed_prefix` takes; a prompt of ids need not have the configured length.
        ``prefix_mask``: bool ``[R, p]``, True where the prompt has a token; what it hides is hidden from
        every row but its own. ``taps`` as in :meth:`forward`. Row ``p - 1 + n`` predicts token n.
        """
        prompt = self.embed_prefix(condition)
        x = torch.cat((prompt, self.embed_tokens(codes)), dim=1)
        at = self.dense_pass(prefix_mask, prompt.shape[1], codes.shape[1], x)
        out: Tensor = self(x, at, taps)
        return out
