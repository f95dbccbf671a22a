"""The base of targets whose prompt is a row of token ids, left-padded, and whose rows share its mask."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.decoding.rows import Allowed
from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.transformer import Pass, Projection, RMSNorm, dense_visible

TargetT = TypeVar("TargetT", bound="PromptedTarget")


class TrunkTarget(nn.Module):
    """A target on a described trunk; its features are the states after the final norm.

    A configuration has ``decoder`` and ``prefix_length`` besides what decoding reads.
    """

    config: Any
    ops: TensorOps
    tok_embeddings: Any
    layers: nn.ModuleList
    norm: RMSNorm
    output: Projection
    rope_cos: Tensor
    rope_sin: Tensor

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
        first, *more = self.head_layers
        x: Tensor = first(features, self.ops)
        for layer in more:
            x = layer(F.gelu(x), self.ops)
        return x.float()

    def allowed(self) -> Allowed | None:
        """Return which codes each image token may be; None: any."""
        return None

    def condition_buffer(self, rows: int) -> Tensor:
        """Return a zeroed buffer for the condition of ``rows`` rows, as :meth:`embed_prefix` takes."""
        shape = (rows, self.config.prefix_length)
        return torch.zeros(shape, dtype=self.ops.index, device=self.output.weight.device)

    def forward(self, x: Tensor, at: Pass, taps: Sequence[int] = ()) -> Tensor:
        """Run all blocks and the final norm on embeddings ``[R, T, D]``; same shape out.

        ``taps``: blocks, counted from 1, whose states come before the features: ``[R, T, (n + 1) D]``.
        """
        out: Tensor = self.config.decoder.run(self.ops, self.layers, x, at, self.norm, taps)
        return out


class PromptedTarget(TrunkTarget, ABC):
    """A target whose prompt is a row of token ids, embedded as its codes are."""

    #: Rows of an image have prompts of one length, padded alike: they share a mask and positions.
    own_prompts = False

    @abstractmethod
    def rotary_rows(self, prefix: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rotary rows of ``prefix`` prompt positions and ``count`` image tokens behind them."""

    def place_rotary(self, device: torch.device) -> None:
        """Make the rotary tables of this prompt length and picture size, float32."""
        c = self.config
        cos, sin = self.rotary_rows(c.prefix_length, c.num_tokens, device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def place_tables(self, device: torch.device) -> None:
        """Make what no checkpoint holds."""
        self.place_rotary(device)

    def fitted(self: TargetT, **sizes: int) -> TargetT:
        """Return this model for another prompt length or picture size; weights are shared."""
        if all(getattr(self.config, name) == value for name, value in sizes.items()):
            return self
        view = copy.copy(self)
        view._buffers = dict(self._buffers)
        view.config = self.config.model_copy(update=sizes)
        view.place_rotary(self.output.weight.device)
        return view

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
        """Run prompt ids ``[R, p]`` and codes ``[R, n]`` in one pass without a cache: [R, p+n, D].

        ``prefix_mask``: bool ``[R, p]``, True where the prompt has a token; ``taps`` as in
        :meth:`forward`. Row ``p - 1 + n`` predicts token n. ``p`` need not be the configured length.
        """
        x = torch.cat((self.embed_prefix(condition), self.embed_tokens(codes)), dim=1)
        length = x.shape[1]
        mask = None
        if prefix_mask is not None:
            mask = self.ops.mask(dense_visible(prefix_mask, length), x.dtype)
        cos, sin = self.rotary_rows(condition.shape[1], codes.shape[1], x.device)
        at = Pass(cos.view(1, length, 1, -1), sin.view(1, length, 1, -1), mask)
        out: Tensor = self(x, at, taps)
        return out
