"""The trunk of Llama-like models that all families' targets and drafters share, by its description.

Source of the plain block: FoundationVision/LlamaGen ``autoregressive/models/gpt.py``; jadohu/LANTERN for
the drafter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device import plan
from lantern_accel.device.kv_cache import Pass as Pass
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.packed import Weight
from lantern_accel.nn.masks import dense_visible as dense_visible
from lantern_accel.nn.rounding import Rounding

REFERENCE = TensorOps()
#: The epsilon of Chameleon's norms of queries and keys; fixed in every implementation.
HEAD_NORM_EPS = 1e-5
#: Where a block's norms stand: before attention and feed-forward, after them (Swin), or both (GLM-4).
Norms = Literal["before", "after", "both"]
#: How queries and keys are normalised: not at all, by a LayerNorm (Chameleon), or by a root mean square.
HeadNorms = Literal["none", "layer", "rms"]


class Projection(nn.Linear):
    """A linear layer whose weight a backend may keep in an order of its own (see :func:`pack`).

    ``packed``: what takes the place of ``weight``.
    """

    packed: Weight | None = None

    # A model's layers take the operations to use; nn.Linear's forward has one argument.
    def forward(  # type: ignore[override]
        self, x: Tensor, ops: TensorOps, residual: Tensor | None = None
    ) -> Tensor:
        weight = self.weight if self.packed is None else self.packed
        if residual is None:
            return ops.linear(x, weight, self.bias)
        return ops.linear_add(x, weight, residual, self.bias)

    def logits(self, x: Tensor, ops: TensorOps) -> Tensor:
        """Multiply as a head does: float32 ``[..., out]`` of features ``x [..., in]``."""
        weight = self.weight if self.packed is None else self.packed
        return ops.linear(x, weight, self.bias, sums=True)

    def keep(self, packed: Weight) -> None:
        """Let ``packed`` stand for the weight, which keeps shape, dtype and device, but no memory."""
        empty = self.weight.new_zeros(()).expand(self.weight.shape)
        self.packed, self.weight = packed, nn.Parameter(empty, requires_grad=False)

    def to_plan(self) -> plan.Matrix:
        """Return the matrix as a plan has it."""
        packed = self.weight if self.packed is None else self.packed
        return plan.Matrix(packed, self.out_features, self.in_features, self.bias)


def pack(module: nn.Module, ops: TensorOps, how: Rounding | None = None) -> None:
    """Hand every projection's weight to the backend, quantized where ``how`` says so.

    Where that makes another one, the first is freed.
    """
    for part in projections(module):
        if part.packed is None:
            packed = ops.pack(part.weight, how)
            if packed is not part.weight:
                part.keep(packed)


def projections(module: nn.Module) -> list[Projection]:
    """Return the projections of a module."""
    return [part for part in module.modules() if isinstance(part, Projection)]


def rounded_copy(
    module: nn.Module, ops: TensorOps, how: Rounding, drafts: bool = False
) -> nn.Module:
    """Return a module whose projections have quantized weights; all else is the first one's own.

    ``drafts``: it drafts for the first one, so that a device may round its activations as well, and that
    it is made quickly rather than as near as can be.
    """
    held = [part.packed for part in projections(module) if part.packed is not None]
    shared: list[object] = [*module.parameters(), *module.buffers(), *held, ops]
    made = copy.deepcopy(module, {id(one): one for one in shared})
    for part in projections(made):
        whole = part.weight if part.packed is None else part.packed
        part.keep(ops.pack(whole, how, drafts))
    return made


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, ops: TensorOps) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def to_plan(self) -> plan.Norm:
        """Return the norm as a plan has it."""
        return plan.Norm(self.weight, self.eps)


class HeadNorm(nn.Module):
    """LayerNorm over each head's width, with a weight and a bias a head, ``[heads, d]``."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [R, T, H, d]``."""
        return F.layer_norm(x, x.shape[-1:], eps=HEAD_NORM_EPS) * self.weight + self.bias


class HeadRMSNorm(nn.Module):
    """RMSNorm over each head's width, with a weight a head, ``[heads, d]``."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [R, T, H, d]``."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


@dataclass(frozen=True)
class Decoder:
    """What tells the trunk of one Llama-like model from another's: a family fills it in.

    ``kv_heads``: heads of keys and values, each of which serves ``heads / kv_heads`` neighbouring query
    heads. ``hidden``: width of the feed-forward. ``bias``: queries, keys and values have one.
    ``head_norm``: how queries and keys are normalised, head by head, before they are rotated; by ``eps``
    where it is by a root mean square. ``input_norm``: the first block has a norm before attention, as all
    others; that of LlamaGen's drafter has none. Which pairs of a head turn, and by which of several
    positions, is in the rotary tables (:mod:`lantern_accel.nn.rotary`). Whether a checkpoint keeps gate
    and up apart is its key layout's.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    eps: float
    bias: bool = False
    head_norm: HeadNorms = "none"
    norms: Norms = "before"
    input_norm: bool = True

    @classmethod
    def of(cls, sizes: Any, hidden: int = 0, **special: Any) -> Decoder:
        """Return the trunk of a network; ``special``: what tells it from a plain one.

        ``sizes``: the configuration; ``hidden``: numbers between the two matrices, 0: its ``ffn_dim``.
        """
        return cls(
            dim=sizes.dim,
            layers=sizes.n_layer,
            heads=sizes.n_head,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            hidden=hidden or sizes.ffn_dim,
            eps=sizes.norm_eps,
            **special,
        )

    @classmethod
    def plain(
        cls, dim: int, heads: int, hidden: int, eps: float, layers: int = 1, **special: Any
    ) -> Decoder:
        """Return a trunk whose heads share nothing; ``special`` as in :meth:`of`."""
        return cls(dim, layers, heads, heads, dim // heads, hidden, eps, **special)

    @property
    def groups(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    def blocks(self) -> nn.ModuleList:
        """Build the blocks."""
        return nn.ModuleList(Block(self, layer == 0) for layer in range(self.layers))

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


class Attention(nn.Module):
    """Self-attention of a described trunk; rows of ``wqkv`` are q, k, v.

    The cache holds keys and values once a group. ``residual``: what the result is added to, where there
    is something.
    """

    def __init__(self, one: Decoder) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.biased = one.heads, one.kv_heads, one.bias
        turned, d = one.heads + one.kv_heads, one.head_dim
        self.wqkv = Projection(one.dim, (turned + one.kv_heads) * d, bias=one.bias)
        self.wo = Projection(one.heads * d, one.dim, bias=False)
        self.qk_norm: HeadNorm | HeadRMSNorm | None = None
        if one.head_norm != "none":
            rms = one.head_norm == "rms"
            self.qk_norm = HeadRMSNorm(turned, d, one.eps) if rms else HeadNorm(turned, d)

    def forward(
        self,
        x: Tensor,
        layer: int,
        at: Pass,
        ops: TensorOps,
        rotary: object,
        residual: Tensor | None = None,
    ) -> Tensor:
        groups, turned = self.heads // self.kv_heads, self.heads + self.kv_heads
        qkv = self.wqkv(x, ops).unflatten(-1, (turned + self.kv_heads, -1))
        if at.cache is not None and groups == 1 and self.qk_norm is None:
            assert at.address is not None and at.mask is not None
            qkv = qkv.unflatten(2, (3, self.heads))
            q = ops.rotate_write(qkv, rotary, at.cache, layer, at.address)
            y = ops.attend(q, at.cache, layer, at.mask)
            return cast(Tensor, self.wo(y.flatten(-2), ops, residual))
        qk, v = qkv[:, :, :turned], qkv[:, :, turned:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = ops.rotate(qk.unsqueeze(2), rotary).squeeze(2)
        q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
        if at.cache is None:
            if groups > 1:
                k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
            y = ops.attend_dense(q, k, v, at.mask)
        else:
            assert at.address is not None and at.mask is not None
            ops.write(at.cache, layer, at.address, k, v)
            if groups > 1:  # [R, T, H, d] as [R, T * groups, kv heads, d]
                shape = (*q.shape[:2], self.kv_heads, groups, q.shape[-1])
                q = q.reshape(shape).transpose(2, 3).flatten(1, 2)
            y = ops.attend(q, at.cache, layer, at.mask)
            if groups > 1:
                y = y.reshape(len(y), -1, groups, *y.shape[2:]).transpose(2, 3).flatten(2, 3)
        return cast(Tensor, self.wo(y.flatten(-2), ops, residual))


class FeedForward(nn.Module):
    """SwiGLU with ``w1`` and ``w3`` stacked into one matrix; ``residual`` as in :class:`Attention`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w13 = Projection(dim, 2 * hidden, bias=False)
        self.w2 = Projection(hidden, dim, bias=False)

    def forward(self, x: Tensor, ops: TensorOps, residual: Tensor | None = None) -> Tensor:
        out: Tensor = self.w2(ops.swiglu(self.w13(x, ops)), ops, residual)
        return out


class Block(nn.Module):
    """Attention and a gated feed-forward, each added to what it read; ``first``: of its trunk."""

    def __init__(self, one: Decoder, first: bool) -> None:
        super().__init__()
        self.norms = one.norms
        given = one.input_norm or not first
        self.attention_norm = RMSNorm(one.dim, one.eps) if given else None
        self.attention = Attention(one)
        self.ffn_norm = RMSNorm(one.dim, one.eps)
        self.feed_forward = FeedForward(one.dim, one.hidden)
        if one.norms == "both":
            self.attention_post_norm = RMSNorm(one.dim, one.eps)
            self.ffn_post_norm = RMSNorm(one.dim, one.eps)

    @property
    def plain(self) -> bool:
        """Whether it is LlamaGen's block, which devices may have kernels for."""
        one = self.attention
        special = one.qk_norm is not None or one.biased or self.norms != "before"
        square = one.wo.in_features == one.wo.out_features
        return not special and square and one.kv_heads == one.heads

    def forward(self, x: Tensor, layer: int, at: Pass, ops: TensorOps, rotary: object) -> Tensor:
        out: Tensor
        if self.norms == "after":
            assert self.attention_norm is not None
            x = x + self.attention_norm(self.attention(x, layer, at, ops, rotary), ops)
            out = x + self.ffn_norm(self.feed_forward(x, ops), ops)
            return out
        y = x if self.attention_norm is None else self.attention_norm(x, ops)
        if self.norms == "both":
            y = self.attention(y, layer, at, ops, rotary)
            x = x + self.attention_post_norm(y, ops)
            y = self.feed_forward(self.ffn_norm(x, ops), ops)
            out = x + self.ffn_post_norm(y, ops)
        else:
            x = self.attention(y, layer, at, ops, rotary, x)
            out = self.feed_forward(self.ffn_norm(x, ops), ops, x)
        return out


def plan_blocks(blocks: nn.ModuleList) -> tuple[plan.BlockWeights, ...] | None:
    """Return blocks as a plan has them; None where one is not a plain :class:`Block`."""
    found = []
    for block in blocks:
        if type(block) is not Block or not block.plain:
            return None
        attention, feed, first = block.attention, block.feed_forward, block.attention_norm
        found.append(
            plan.BlockWeights(
                heads=attention.heads,
                attention_norm=None if first is None else first.to_plan(),
                wqkv=attention.wqkv.to_plan(),
                wo=attention.wo.to_plan(),
                ffn_norm=block.ffn_norm.to_plan(),
                w13=feed.w13.to_plan(),
                w2=feed.w2.to_plan(),
            )
        )
    return tuple(found)
