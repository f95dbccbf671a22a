"""The decoder block that LlamaGen's target and its EAGLE drafter share, and 2D rotary tables.

Source: FoundationVision/LlamaGen ``autoregressive/models/gpt.py``; jadohu/LANTERN for the drafter.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device import plan
from lantern_accel.device.kv_cache import Pass as Pass
from lantern_accel.device.operations import TensorOps, flags
from lantern_accel.nn.rounding import Rounded, Rounding, rounded

REFERENCE = TensorOps()


PrefixRotary = Literal["zero", "identity"]


def rotary_table_2d(
    prefix: int,
    grid: int,
    head_dim: int,
    base: float = 10000.0,
    prefix_rotary: PrefixRotary = "zero",
) -> tuple[Tensor, Tensor]:
    """Return LlamaGen's 2D rotary table as ``cos, sin``, float32 ``[prefix + grid*grid, d/2]``.

    With ``h = d/2`` there are ``h/2`` frequencies ``base ** (-2j/h)``; the first half of the angles
    takes the row, the second the column. Prefix rows are zero in both tables, as LlamaGen has them:
    not the identity, so that every score that involves a prefix position is 0. ``"identity"`` lets
    the image attend to the prompt by content.
    """
    half = head_dim // 2
    freqs = 1.0 / (base ** (torch.arange(0, half, 2).float()[: half // 2] / half))
    angles = torch.outer(torch.arange(grid).float(), freqs)
    rows = angles[:, None, :].expand(grid, grid, -1)
    cols = angles[None, :, :].expand(grid, grid, -1)
    flat = torch.cat((rows, cols), dim=-1).reshape(grid * grid, half)
    zeros = torch.zeros(prefix, half)
    first = zeros if prefix_rotary == "zero" else torch.ones(prefix, half)
    return torch.cat((first, flat.cos())), torch.cat((zeros, flat.sin()))


def grid_tables(config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return :func:`rotary_table_2d` of a target's or drafter's sizes on ``device``.

    Computed on the host, so that every device has the same bits.
    """
    c = config
    with torch.device("cpu"):
        cos, sin = rotary_table_2d(
            c.prefix_length, c.grid, c.head_dim, c.rope_base, c.prefix_rotary
        )
    return cos.to(device), sin.to(device)


def dense_visible(prefix_mask: Tensor, length: int) -> Tensor:
    """Return the causal mask with hidden caption pads, bool ``[R, 1, length, length]``.

    ``prefix_mask``: bool ``[R, prefix]``. A padded position still sees itself (LlamaGen's rule).
    """
    rows, prefix = prefix_mask.shape
    index = torch.arange(length, dtype=torch.int32, device=prefix_mask.device)
    causal = index[:, None] >= index[None, :]
    after = flags(True, rows, length - prefix, device=prefix_mask.device)
    keys = torch.cat((prefix_mask, after), dim=1)
    visible = causal & keys[:, None, :] | (index[:, None] == index[None, :])
    return visible.unsqueeze(1)


def pads_visible(prefix_mask: Tensor, visible: Tensor) -> Tensor:
    """Let padded positions of :func:`dense_visible` see all before them and the caption behind them.

    LANTERN's rule, from adding two masks. Nothing that a padded position holds reaches the target's
    tokens, but a drafter that was trained without a mask reads it.
    """
    length = visible.shape[-1]
    index = torch.arange(length, dtype=torch.int32, device=visible.device)
    causal = index[:, None] >= index[None, :]
    both = causal | prefix_mask[:, None, :]
    return torch.where(prefix_mask[:, :, None], visible[:, 0], both).unsqueeze(1)


class Projection(nn.Linear):
    """A linear layer whose weight a backend may keep in an order of its own (see :func:`pack`).

    ``packed``: what takes the place of ``weight``, a tensor or what the backend makes of a
    :class:`~lantern_accel.nn.rounding.Rounded` one.
    """

    packed: Any = None

    # A model's layers take the operations to use; nn.Linear's forward has one argument.
    def forward(  # type: ignore[override]
        self, x: Tensor, ops: TensorOps, residual: Tensor | None = None
    ) -> Tensor:
        weight = self.weight if self.packed is None else self.packed
        if isinstance(weight, Rounded):
            out = ops.linear_rounded(x, weight, self.bias)
            return out if residual is None else residual + out
        if residual is None:
            return ops.linear(x, weight, self.bias)
        return ops.linear_add(x, weight, residual, self.bias)

    def described(self) -> plan.Matrix:
        """Return the matrix as a plan has it."""
        packed = self.weight if self.packed is None else self.packed
        return plan.Matrix(packed, self.out_features, self.in_features, self.bias)


def pack(module: nn.Module, ops: TensorOps, how: Rounding | None = None) -> None:
    """Hand every projection's weight to the backend, in fewer bits where ``how`` says so.

    Where that makes another one, the first is freed: ``weight`` keeps its shape, dtype and device, but no
    memory.
    """
    for part in module.modules():
        if isinstance(part, Projection) and part.packed is None:
            weight = part.weight
            packed = ops.pack(weight) if how is None else ops.pack_rounded(rounded(weight, how))
            if packed is not weight:
                part.packed = packed
                empty = weight.new_zeros(()).expand(weight.shape)
                part.weight = nn.Parameter(empty, requires_grad=False)


def projections(module: nn.Module) -> list[Projection]:
    """Return the projections of a module."""
    return [part for part in module.modules() if isinstance(part, Projection)]


def rounded_copy(
    module: nn.Module, ops: TensorOps, how: Rounding, drafts: bool = False
) -> nn.Module:
    """Return a module whose projections have weights in fewer bits; all else is the first one's own.

    ``drafts``: it drafts for the first one, so that a device may round its activations as well, and that
    it is made quickly rather than as near as can be.
    """
    held = [part.packed for part in projections(module) if part.packed is not None]
    shared: list[Any] = [*module.parameters(), *module.buffers(), *held, ops]
    made = copy.deepcopy(module, {id(one): one for one in shared})
    for part in projections(made):
        whole = part.weight if part.packed is None else ops.unpack(part.packed)
        codes = rounded(whole, how, tries=1) if drafts else rounded(whole, how)
        part.packed = ops.pack_rounded(codes, drafts)
        empty = part.weight.new_zeros(()).expand(part.weight.shape)
        part.weight = nn.Parameter(empty, requires_grad=False)
    return made


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, ops: TensorOps) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def described(self) -> plan.Norm:
        """Return the norm as a plan has it."""
        return plan.Norm(self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head self-attention without biases; rows of ``wqkv`` are q, k, v.

    ``residual``: what the result is added to, where there is something.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = Projection(dim, 3 * dim, bias=False)
        self.wo = Projection(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        layer: int,
        at: Pass,
        ops: TensorOps,
        rotary: Any,
        residual: Tensor | None = None,
    ) -> Tensor:
        qkv = self.wqkv(x, ops).unflatten(-1, (3, self.heads, -1))
        if at.cache is None:
            turned = ops.rotate(qkv[:, :, :2], rotary)
            y = ops.attend_dense(turned[:, :, 0], turned[:, :, 1], qkv[:, :, 2], at.mask)
        else:
            assert at.address is not None and at.mask is not None
            q = ops.rotate_write(qkv, rotary, at.cache, layer, at.address)
            y = ops.attend(q, at.cache, layer, at.mask)
        out: Tensor = self.wo(y.flatten(-2), ops, residual)
        return out


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
    """Pre-norm decoder block; the drafter's block has no norm before attention."""

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        eps: float,
        *,
        input_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps) if input_norm else None
        self.attention = Attention(dim, heads)
        self.ffn_norm = RMSNorm(dim, eps)
        self.feed_forward = FeedForward(dim, hidden)
        self.dropout = dropout

    def forward(self, x: Tensor, layer: int, at: Pass, ops: TensorOps, rotary: Any) -> Tensor:
        y = x if self.attention_norm is None else self.attention_norm(x, ops)
        if self.training and self.dropout:
            x = x + F.dropout(self.attention(y, layer, at, ops, rotary), self.dropout)
            y = self.feed_forward(self.ffn_norm(x, ops), ops)
            return x + F.dropout(y, self.dropout)
        x = self.attention(y, layer, at, ops, rotary, x)
        out: Tensor = self.feed_forward(self.ffn_norm(x, ops), ops, x)
        return out


def described(blocks: nn.ModuleList) -> tuple[plan.Block, ...] | None:
    """Return blocks as a plan has them; None where one is not a :class:`Block`."""
    found = []
    for block in blocks:
        if type(block) is not Block:
            return None
        attention, feed, first = block.attention, block.feed_forward, block.attention_norm
        found.append(
            plan.Block(
                heads=attention.heads,
                attention_norm=None if first is None else first.described(),
                wqkv=attention.wqkv.described(),
                wo=attention.wo.described(),
                ffn_norm=block.ffn_norm.described(),
                w13=feed.w13.described(),
                w2=feed.w2.described(),
            )
        )
    return tuple(found)
