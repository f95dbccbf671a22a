"""The decoder trunk of Llama-like models, built from a description that a family fills in.

Every block is attention and a gated feed-forward, each added to what it read. What differs from one
family to the next is data: how many heads share keys and values, biases, norms of queries and keys,
and where the norms stand. Which pairs of a head turn, and by which of several positions, is in the
rotary tables (:mod:`lantern_accel.nn.rotary`). Whether a checkpoint keeps gate and up apart is its
key layout's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.transformer import Block, FeedForward, Pass, Projection, RMSNorm

#: The epsilon of the norms of queries and keys; fixed in every implementation.
HEAD_NORM_EPS = 1e-5
#: Where a block's norms stand: before attention and feed-forward, after them (Swin), or both (GLM-4).
Norms = Literal["before", "after", "both"]


@dataclass(frozen=True)
class Decoder:
    """What tells the trunk of one Llama-like model from another's.

    ``kv_heads``: heads of keys and values, each of which serves ``heads / kv_heads`` neighbouring query
    heads. ``hidden``: width of the feed-forward. ``bias``: queries, keys and values have one.
    ``head_norm``: queries and keys are normalised head by head before they are rotated.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    eps: float
    bias: bool = False
    head_norm: bool = False
    norms: Norms = "before"

    @classmethod
    def of(cls, sizes: Any, **special: Any) -> Decoder:
        """Return the trunk of a network; ``special``: what tells it from a plain one.

        ``sizes``: the configuration, with ``kv_heads``, ``head_dim`` and ``ffn_dim`` whatever its fields.
        """
        return cls(
            dim=sizes.dim,
            layers=sizes.n_layer,
            heads=sizes.n_head,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            hidden=sizes.ffn_dim,
            eps=sizes.norm_eps,
            **special,
        )

    @property
    def groups(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def plain(self) -> bool:
        """Whether it is LlamaGen's block, which devices may have kernels for."""
        special = self.bias or self.head_norm or self.norms != "before" or self.groups > 1
        return not special and self.heads * self.head_dim == self.dim

    @property
    def block_weights(self) -> int:
        """Numbers in the matrices of one block, all of which a pass reads."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.dim * (heads + 3 * self.hidden)

    def blocks(self, dropout: float = 0.0) -> nn.ModuleList:
        """Build the blocks; only plain ones can be trained with ``dropout``."""
        if self.plain:
            made: list[nn.Module] = [
                Block(self.dim, self.heads, self.hidden, self.eps, dropout=dropout)
                for _ in range(self.layers)
            ]
        else:
            made = [DecoderBlock(self) for _ in range(self.layers)]
        return nn.ModuleList(made)

    def run(
        self,
        ops: TensorOps,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        norm: RMSNorm | None = None,
        taps: Sequence[int] = (),
    ) -> Tensor:
        """Run the blocks on ``x [R, T, D]`` (:meth:`TensorOps.trunk`).

        Query heads of a group become further queries of their one head: no device has to know of groups.
        """
        if self.groups > 1 and at.cache is not None:
            assert at.mask is not None
            mask = at.mask.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3)
            at = replace(at, mask=mask)
        return ops.trunk(blocks, x, at, taps, norm)


class HeadNorm(nn.Module):
    """LayerNorm over each head's width, with a weight and a bias a head, ``[heads, d]``."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [R, T, H, d]``."""
        return F.layer_norm(x, x.shape[-1:], eps=HEAD_NORM_EPS) * self.weight + self.bias


class GroupedAttention(nn.Module):
    """Self-attention whose query heads may share keys and values; rows of ``wqkv`` are q, k, v.

    The cache holds keys and values once a group. ``residual``: what the result is added to, where there
    is something.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.heads, self.kv_heads = decoder.heads, decoder.kv_heads
        d = decoder.head_dim
        rows = (self.heads + 2 * self.kv_heads) * d
        self.wqkv = Projection(decoder.dim, rows, bias=decoder.bias)
        self.wo = Projection(self.heads * d, decoder.dim, bias=False)
        self.qk_norm: HeadNorm | None = None
        if decoder.head_norm:
            self.qk_norm = HeadNorm(self.heads + self.kv_heads, d)

    def forward(
        self,
        x: Tensor,
        layer: int,
        at: Pass,
        ops: TensorOps,
        rotary: Any,
        residual: Tensor | None = None,
    ) -> Tensor:
        turned = self.heads + self.kv_heads
        qkv = self.wqkv(x, ops).unflatten(-1, (turned + self.kv_heads, -1))
        qk, v = qkv[:, :, :turned], qkv[:, :, turned:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = ops.rotate(qk.unsqueeze(2), rotary).squeeze(2)
        q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
        groups = self.heads // self.kv_heads
        if at.cache is None:
            if groups > 1:
                k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
            y = ops.attend_dense(q, k, v, at.mask).flatten(-2)
        else:
            assert at.address is not None and at.mask is not None
            ops.write(at.cache, layer, at.address, k, v)
            if groups > 1:  # [R, T, H, d] as [R, T * groups, kv heads, d]
                shape = (*q.shape[:2], self.kv_heads, groups, q.shape[-1])
                q = q.reshape(shape).transpose(2, 3).flatten(1, 2)
            y = ops.attend(q, at.cache, layer, at.mask)
            if groups > 1:
                y = y.reshape(len(y), -1, groups, *y.shape[2:]).transpose(2, 3).flatten(2, 3)
            y = y.flatten(-2)
        out: Tensor = self.wo(y, ops, residual)
        return out


class DecoderBlock(nn.Module):
    """One block of a described trunk."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        dim, eps = decoder.dim, decoder.eps
        self.norms = decoder.norms
        self.attention_norm = RMSNorm(dim, eps)
        self.attention = GroupedAttention(decoder)
        self.ffn_norm = RMSNorm(dim, eps)
        self.feed_forward = FeedForward(dim, decoder.hidden)
        if decoder.norms == "both":
            self.attention_post_norm = RMSNorm(dim, eps)
            self.ffn_post_norm = RMSNorm(dim, eps)

    def forward(self, x: Tensor, layer: int, at: Pass, ops: TensorOps, rotary: Any) -> Tensor:
        out: Tensor
        if self.norms == "after":
            x = x + self.attention_norm(self.attention(x, layer, at, ops, rotary), ops)
            out = x + self.ffn_norm(self.feed_forward(x, ops), ops)
        elif self.norms == "both":
            y = self.attention(self.attention_norm(x, ops), layer, at, ops, rotary)
            x = x + self.attention_post_norm(y, ops)
            y = self.feed_forward(self.ffn_norm(x, ops), ops)
            out = x + self.ffn_post_norm(y, ops)
        else:
            x = self.attention(self.attention_norm(x, ops), layer, at, ops, rotary, x)
            out = self.feed_forward(self.ffn_norm(x, ops), ops, x)
        return out
