"""The tensor operations that a device may implement its own way, with reference implementations.

Models call :class:`Ops` and nothing device-specific. A backend inherits :class:`TensorOps` and overrides
what its device does better.

Shapes: ``R`` rows (images x CFG branches), ``T`` query positions, ``H`` heads, ``d`` head width,
``L`` cache capacity in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.capture import Capture
from lantern_accel.device.kv_cache import KVCache, KVLayout, Pass
from lantern_accel.device.packed import Format, Weight, dense
from lantern_accel.device.preferences import Preferences
from lantern_accel.device.sampling import SamplingOps


@dataclass(frozen=True)
class Rotary:
    """Rotary rows of one pass, broadcasting against pairs ``[R, T, ..., d/2, 2]``, float32.

    ``cos`` has one number for both of a pair, ``sin`` two: what the other of the pair is multiplied by.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Rotary:
        """Make them of one cosine and one sine a pair."""
        return cls(cos.unsqueeze(-1), torch.stack((-sin, sin), dim=-1))


class Ops(Protocol):
    """The tensor operations of a model."""

    device: torch.device = torch.device("cpu")
    preferences: Preferences = Preferences()
    index: torch.dtype = torch.int64
    """Dtype of token ids, positions and cache slots in a step; int32 where the device prefers it."""
    text_encoder: Callable[[nn.Module], nn.Module] | None = None
    """What adapts a text encoder of transformers to the device; None: it runs as it is."""

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        """Choose the layout of a cache with at least ``capacity`` slots a row.

        The reference: a layer's keys, and its values, are one tensor ``[rows * capacity, heads,
        head_dim]``; with ``head_major`` one of ``[rows * heads * capacity, head_dim]``.
        """
        return KVLayout(layers, rows, capacity, heads, head_dim, dtype)

    def allocate(self, layout: KVLayout) -> KVCache:
        """Allocate a zeroed cache that keeps its addresses."""
        shape, dtype, layers = layout.shape, layout.dtype, range(layout.layers)
        keys = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in layers)
        values = tuple(torch.zeros_like(one) for one in keys)
        return KVCache(layout, keys, values, layout.pieces(self.device, self.index))

    def address(self, kv: KVCache, slots: Tensor) -> Tensor:
        """Turn slots, int ``[R, T]``, into the form that :meth:`write` takes.

        Computed once per pass and used by all layers. The reference gives flat indices into a layer's
        tensor, ``[R * T]`` or, by head, ``[R * T * H]``; int64, because index_copy_ takes no other.
        """
        at, first = kv.layout, kv.first
        if first is None or first.dtype != slots.dtype:
            first = at.pieces(self.device, slots.dtype)
        if not at.head_major:
            return (slots + first.unsqueeze(1)).reshape(-1).long()
        return (first.view(at.rows, 1, at.heads) + slots.unsqueeze(-1)).reshape(-1).long()

    def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer at ``address``, in place; no other slot changes."""
        for side, new in ((kv.keys[layer], k), (kv.values[layer], v)):
            if new.shape[-1] < kv.layout.head_dim:
                new = F.pad(new, (0, kv.layout.head_dim - new.shape[-1]))
            side.index_copy_(0, address, new.reshape(-1, *side.shape[1:]))

    def pack(self, weight: Weight, form: Format | None = None, drafts: bool = False) -> Weight:
        """Return a weight matrix ``[out, in]`` as :meth:`linear` wants it, rounded to ``form`` if given.

        Called once a matrix when a model is loaded; what it returns replaces ``weight``. ``weight`` is a
        tensor, what this method returned for one, or rounded by ``form`` already (then ``form`` is not
        given). ``drafts``: it is a copy's that drafts, so that its products may round activations too:
        the target checks what comes of them. The reference wants all of them as they are. Raises
        RequestError for floating-point codes where the device multiplies none.
        """
        if form is None:
            return weight
        return self.pack(form.round_matrix(dense(weight), drafts), drafts=drafts)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, sums: bool = False
    ) -> Tensor:
        """Multiply ``x [..., in]`` by a packed weight: ``[..., out]``, ``x @ weight.T + bias``.

        ``weight``: what :meth:`pack` returned, of a matrix ``[out, in]``. Sums are made in float32; the
        result has the dtype of ``x``. ``sums``: it is float32, as logits are: a device that has the sums
        should leave them so, since of what bfloat16 costs, most is lost here. The reference rounds them
        first, and makes the whole of a quantized matrix, which saves memory but no time.
        """
        out = F.linear(x, weight if isinstance(weight, Tensor) else weight.dense(x.dtype), bias)
        return out.float() if sums else out

    def linear_add(
        self, x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return ``residual [..., out]`` plus the product of ``x [..., in]`` and a packed weight.

        The residual is given up: a device may put the sum in its memory. The reference leaves it.
        """
        return residual + self.linear(x, weight, bias)

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn a boolean mask (True = visible) into the form that :meth:`attend` takes.

        The reference is additive: 0 where visible, the smallest finite number elsewhere. Every element
        by itself: parts of a mask, each in this form, may be joined.
        """
        hidden = torch.finfo(dtype).min
        full = torch.full(visible.shape, hidden, dtype=dtype, device=visible.device)
        return full.masked_fill_(visible, 0)

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``.

        ``q`` is rotated already, and so are the keys of the cache. ``mask``: what :meth:`mask` made,
        in the dtype of ``q``, the same for all heads; by the reference it is added to the scores, 0 where
        slot l is visible to position t. Scores are scaled by ``d ** -0.5``. Returns ``[R, T, H, d]`` in
        the dtype of ``q``. Slots that are not visible may hold anything finite.
        """
        k, v = kv.by_head(layer, mask.shape[-1])
        return self.attend_dense(q, k.transpose(1, 2), v.transpose(1, 2), mask)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention, scale ``d ** -0.5``; ``k, v [R, L, H, d]``; ``mask=None`` is causal.

        ``q [R, T, H, d]``; ``mask`` as in :meth:`attend`; returns ``[R, T, H, d]`` in the dtype of ``q``.
        """
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return out.transpose(1, 2)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise ``x [..., D]`` in float32, return to its dtype, then scale by ``weight [D]``.

        ``x / sqrt(mean(x ** 2) + eps) * weight``, rounded in LlamaGen's order.
        """
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        return y.to(x.dtype) * weight

    def rotary(self, cos: Tensor, sin: Tensor) -> object:
        """Turn rotary rows into the form that :meth:`rotate` takes; made once a pass.

        ``cos, sin`` float32, broadcasting against ``[R, T, ..., d/2]``.
        """
        return Rotary.of(cos, sin)

    def rotate(self, x: Tensor, rotary: object) -> Tensor:
        """Rotate adjacent pairs ``(x0, x1), (x2, x3), ...`` of ``x [R, T, ..., d]`` in float32.

        ``rotary``: what :meth:`rotary` makes, or the pair that it makes it of.
        """
        return rotate_float32(x, rotary).to(x.dtype)

    def rotate_write(
        self, qkv: Tensor, rotary: object, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k of ``qkv [R, T, 3, H, d]``, :meth:`write` k and v of a layer; return q."""
        rotated = self.rotate(qkv[:, :, :2], rotary)
        self.write(kv, layer, address, rotated[:, :, 1], qkv[:, :, 2])
        return rotated[:, :, 0]

    def trunk(
        self,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        taps: Sequence[int] = (),
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Run a stack of decoder blocks on ``x [R, T, D]``, then ``norm`` where there is one.

        ``blocks`` and ``norm`` are modules of :mod:`lantern_accel.nn.transformer`, or have the same
        attributes. Returns ``[R, T, (taps + 1) D]``: the states after the blocks ``taps``, counted from 1
        and ascending, then the last ones. ``x`` is given up (see :meth:`linear_add`). The reference runs
        one block after another; the rotary form is made once for all.
        """
        rotary = self.rotary(at.cos.unsqueeze(2), at.sin.unsqueeze(2))
        states = []
        for i, block in enumerate(blocks):
            x = block(x, i, at, self, rotary)
            if i + 1 in taps:
                states.append(x.clone() if self.preferences.sums_in_place else x)
        states.append(x if norm is None else norm(x, self))
        return torch.cat(states, dim=-1) if taps else states[0]

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up [..., F]`` of ``x = [gate; up] [..., 2F]``, in the dtype of ``x``."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class TensorOps(Ops, SamplingOps, Capture):
    """The reference of all that a model and a step call; it runs on every device that torch knows."""


def rotate_float32(x: Tensor, rotary: object) -> Tensor:
    """Return what :meth:`Ops.rotate` does in float32, whatever the dtype of ``x``.

    ``rotary``: a :class:`Rotary`, or the pair of cosines and sines that it is made of.
    """
    if not isinstance(rotary, Rotary):
        assert isinstance(rotary, tuple)
        rotary = Rotary.of(*rotary)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    swapped = torch.stack((pairs[..., 1], pairs[..., 0]), dim=-1)
    # Products with float32 are float32.
    return (pairs * rotary.cos + swapped * rotary.sin).flatten(-2)


def flags(value: bool, *shape: int, device: torch.device) -> Tensor:
    """Return a boolean tensor ``shape`` full of ``value``.

    Filled with a number: compilers that take graphs through TorchScript leave them for a bool scalar,
    which is what ``zeros`` and ``ones`` of this dtype become.
    """
    return torch.full(shape, int(value), dtype=torch.bool, device=device)
