"""Runs a stack of plain blocks on few rows, in five kernels a layer.

Norm, product, rotation and cache write are one kernel; attention is one; a product and its residual are
one, as are the second norm, its product and the gate. Each stage is done by these or by torch's product
between kernels of its own, whichever was measured to be faster (:mod:`.choosing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device import operations
from lantern_accel.device.capture import Capture
from lantern_accel.device.kv_cache import Pass
from lantern_accel.device.plan import BlockWeights, Matrix, Norm, Stack
from lantern_accel.device.preferences import Preferences
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.nn.transformer import plan_blocks
from lantern_accel_cuda.kernels import few, fused

Rotary = tuple[Tensor, Tensor]


class Ops(operations.Ops, SamplingOps, Capture, Protocol):
    """What steps and their stages need of the backend."""

    @property
    def preferences(self) -> Preferences: ...  # type: ignore[override]  # it depends on the kernels
    def serves_few(self, x: Tensor) -> bool: ...
    def shape_of(self, stage: str, weight: Tensor, rows: int) -> int | None: ...


def project_heads(
    x: Tensor, norm: Norm | None, weight: Tensor, rotary: Rotary, address: Tensor, k: Tensor,
    v: Tensor, heads: int, shape: int | None, cores: int,
) -> Tensor:  # fmt: skip
    """Return the rotated queries ``[R, T, H, d]`` of ``x [R, T, D]``; store keys and values.

    ``shape``: of :data:`.few.SHAPES`, by number; None: torch's product serves. The rest as in
    :func:`.few.rotate`.
    """
    if shape is not None:
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return few.rotate(x, gain, eps, weight, *rotary, address, k, v, heads, shape, cores)
    if norm is not None:
        x = fused.rms_norm(x, norm.weight, norm.eps)
    qkv = F.linear(x, weight).view(*x.shape[:2], 3, heads, -1)
    return fused.rotate_store(qkv, *rotary, address, k, v)


def apply_gate(x: Tensor, norm: Norm, weight: Tensor, shape: int | None, cores: int) -> Tensor:
    """Return ``silu(gate) * up`` of the normalised ``x [..., D]``, ``[..., F]``."""
    if shape is not None:
        return few.gate(x, norm.weight, norm.eps, weight, shape, cores)
    x = fused.rms_norm(x, norm.weight, norm.eps)
    return fused.swiglu(F.linear(x, weight))


def add_product(x: Tensor, weight: Tensor, residual: Tensor, shape: int | None, cores: int) -> None:
    """Add a product to the residual, where it lies."""
    if shape is not None:
        few.add(x, weight, residual, shape, cores)
        return
    residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())


def sums(x: Tensor, weight: Tensor, shape: int | None, cores: int) -> Tensor:
    """Return a product's sums in float32."""
    if shape is not None:
        return few.sums(x, weight, shape, cores)
    flat = x.reshape(-1, x.shape[-1])
    return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)


def _weights(block: BlockWeights) -> tuple[Matrix, ...]:
    return block.wqkv, block.wo, block.w13, block.w2


def _serves(matrix: Matrix, dtype: torch.dtype) -> bool:
    weight = matrix.packed
    whole = isinstance(weight, Tensor) and weight.dtype == dtype and weight.is_contiguous()
    return whole and matrix.bias is None and matrix.columns % 16 == 0


def run(
    ops: Ops, cores: int, blocks: nn.ModuleList, x: Tensor, at: Pass, taps: Sequence[int],
    norm: nn.Module | None,
) -> Tensor | None:  # fmt: skip
    """Run blocks on ``x [R, T, D]`` (:meth:`.TensorOps.trunk`); None where they are not served.

    ``cores``: the card's multiprocessors.
    """
    stack = plan_blocks(blocks)
    if stack is None or not _few(stack, x, at):
        return None
    rotary = at.cos.unsqueeze(2), at.sin.unsqueeze(2)
    x = x.contiguous()
    states = []
    for layer, block in enumerate(stack):
        _layer(ops, cores, block, x, layer, at, rotary)
        if layer + 1 in taps:
            states.append(x.clone())
    states.append(x if norm is None else norm(x, ops))
    return torch.cat(states, dim=-1) if taps else states[0]


def run_stack(ops: Ops, cores: int, stack: Stack, x: Tensor, at: Pass) -> Tensor:
    """Run a plan's blocks and norm on ``x [R, T, D]``, which is given up, as a target's trunk does."""
    rotary = at.cos.unsqueeze(2), at.sin.unsqueeze(2)
    fused_stages = ops.serves_few(x) and _few(stack.blocks, x, at)
    for layer, block in enumerate(stack.blocks):
        if fused_stages:
            _layer(ops, cores, block, x, layer, at, rotary)
        else:
            x = _by_operation(ops, block, x, layer, at, rotary)
    return ops.rms_norm(x, stack.norm.weight, stack.norm.eps)


def _few(stack: Sequence[BlockWeights], x: Tensor, at: Pass) -> bool:
    """Return whether the kernels of few rows serve a pass."""
    if x.shape[0] * x.shape[1] > few.MOST_ROWS or torch.is_grad_enabled():
        return False
    if at.cache is None or at.mask is None or at.address is None or at.mask.dtype != torch.int8:
        return False
    whole = all(_serves(one, x.dtype) for block in stack for one in _weights(block))
    return whole and at.cache.layout.dtype == x.dtype


def _by_operation(
    ops: Ops, block: BlockWeights, x: Tensor, layer: int, at: Pass, rotary: Rotary
) -> Tensor:
    """Return what one block makes of ``x``, by an operation of the backend after the other."""
    kv = at.cache
    assert kv is not None and at.address is not None and at.mask is not None
    first, y = block.attention_norm, x
    if first is not None:
        y = ops.rms_norm(y, first.weight, first.eps)
    qkv = ops.linear(y, block.wqkv.packed, block.wqkv.bias)
    qkv = qkv.view(*qkv.shape[:-1], 3, block.heads, -1)
    y = ops.attend(ops.rotate_write(qkv, rotary, kv, layer, at.address), kv, layer, at.mask)
    x = ops.linear_add(y.flatten(-2), block.wo.packed, x, block.wo.bias)
    y = ops.rms_norm(x, block.ffn_norm.weight, block.ffn_norm.eps)
    y = ops.swiglu(ops.linear(y, block.w13.packed, block.w13.bias))
    return ops.linear_add(y, block.w2.packed, x, block.w2.bias)


def _layer(
    ops: Ops, cores: int, block: BlockWeights, x: Tensor, layer: int, at: Pass, rotary: Rotary
) -> None:
    """Run one block on ``x``, in place."""
    kv = at.cache
    assert kv is not None and at.address is not None and at.mask is not None
    wqkv, wo, w13, w2 = (_tensor(one) for one in _weights(block))
    k, v = kv.by_head(layer, kv.layout.capacity)
    rows = x.shape[0] * x.shape[1]
    q = project_heads(
        x, block.attention_norm, wqkv, rotary, at.address, k, v, block.heads,
        ops.shape_of("rotate", wqkv, rows), cores,
    )  # fmt: skip
    y = ops.attend(q, kv, layer, at.mask).flatten(-2)
    add_product(y, wo, x, ops.shape_of("add", wo, rows), cores)
    y = apply_gate(x, block.ffn_norm, w13, ops.shape_of("gate", w13, rows), cores)
    add_product(y, w2, x, ops.shape_of("add", w2, rows), cores)


def _tensor(matrix: Matrix) -> Tensor:
    assert isinstance(matrix.packed, Tensor)
    return matrix.packed
