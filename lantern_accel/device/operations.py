"""The tensor operations that a device may implement its own way, with reference implementations.

Models call these and nothing device-specific. A backend inherits :class:`TensorOps` and overrides
what its device does better; the reference runs on every device that torch knows.

Shapes: ``R`` rows (images x CFG branches), ``T`` query positions, ``H`` heads, ``d`` head width,
``L`` cache capacity in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.kv_cache import KVCache, KVLayout, Pass
from lantern_accel.device.plan import FusedStep, StepPlan
from lantern_accel.device.sampling import SamplingOps

#: Called with a phase's name; the phase runs inside the context that it returns.
PhaseListener = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Rotary:
    """Rotary rows of one pass, broadcasting against pairs ``[R, T, ..., d/2, 2]``, float32.

    ``cos`` has one number for both of a pair, ``sin`` two: what the other of the pair is multiplied by.
    """

    cos: Tensor
    sin: Tensor


class HostCopy:
    """Brings a small buffer to the host without making the device wait for the host.

    ``post`` starts a copy of what the buffer holds once the work given so far has run; ``read`` waits
    for the oldest posted copy. With ``lag`` steps between the two, a device that runs ahead of the
    host never stands still. The reference copies when it is read, so it has no lag.
    """

    lag: int = 0

    def __init__(self, source: Tensor) -> None:
        self._source = source

    def post(self) -> None:
        """Start a copy."""

    def read(self) -> Tensor:
        """Return the oldest posted copy that was not read yet, on the host."""
        return self._source.cpu()

    def clear(self) -> None:
        """Forget every posted copy that was not read; a new request starts with this.

        A request that was interrupted leaves copies behind, which the next one would read as its own.
        """


class TensorOps(SamplingOps):
    """Reference implementation of every operation a device may replace."""

    device: torch.device = torch.device("cpu")

    skips_hidden: bool = False
    """Whether attention reads visible slots alone: then nothing is gained by steps of fewer slots."""

    skips_blind: bool = False
    """Whether :meth:`trunk` leaves out rows that see nothing, as complete images of a batch then do."""

    sums_in_place: bool = False
    """Whether :meth:`linear_add` writes over its residual: a state that is kept is then copied."""

    listener: PhaseListener | None = None
    """What :meth:`listen` put in place; None outside its block."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase of the step (draft, verify, accept, commit) for the listener, if there is one.

        A backend that marks phases for its own profiler leaves them to this method while
        ``self.listener`` is set.
        """
        return nullcontext() if self.listener is None else self.listener(name)

    @contextmanager
    def listen(self, listener: PhaseListener) -> Iterator[None]:
        """Report every phase of eager steps to ``listener`` inside the block.

        ``listener(name)`` returns the context that the phase runs in. The listener before it is put
        back afterwards. A replay has no phases to report; see ``Replay.timed``.
        """
        before, self.listener = self.listener, listener
        try:
            yield
        finally:
            self.listener = before

    def host_copy(self, source: Tensor) -> HostCopy:
        """Return a way to read ``source``, a small static buffer, while steps run."""
        return HostCopy(source)

    # --- key-value cache -----------------------------------------------------------------------

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
        return KVCache(layout, keys, values, self.pieces(layout, self.index))

    def pieces(self, layout: KVLayout, index: torch.dtype) -> Tensor:
        """Return where each row, or each head of each row, begins in a layer's tensor, integer."""
        count = layout.rows * (layout.heads if layout.head_major else 1)
        end = count * layout.capacity
        return torch.arange(0, end, layout.capacity, device=self.device, dtype=index)

    def address(self, kv: KVCache, slots: Tensor) -> Tensor:
        """Turn slots, int ``[R, T]``, into the form that :meth:`write` takes.

        Computed once per pass and used by all layers. The reference gives flat indices into a layer's
        tensor, ``[R * T]`` or, by head, ``[R * T * H]``; int64, because index_copy_ takes no other.
        """
        at, first = kv.layout, kv.first
        if first is None or first.dtype != slots.dtype:
            first = self.pieces(at, slots.dtype)
        if not at.head_major:
            return (slots + first.unsqueeze(1)).reshape(-1).long()
        return (first.view(at.rows, 1, at.heads) + slots.unsqueeze(-1)).reshape(-1).long()

    def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer at ``address``, in place; no other slot changes."""
        for side, new in ((kv.keys[layer], k), (kv.values[layer], v)):
            if new.shape[-1] < kv.layout.head_dim:
                new = F.pad(new, (0, kv.layout.head_dim - new.shape[-1]))
            side.index_copy_(0, address, new.reshape(-1, *side.shape[1:]))

    def by_head(self, kv: KVCache, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first ``count`` slots as views, ``[R, H, count, d]`` each."""
        at = kv.layout
        if at.head_major:
            shape = (at.rows, at.heads, at.capacity, at.head_dim)
            k, v = (side[layer].view(shape) for side in (kv.keys, kv.values))
        else:
            shape = (at.rows, at.capacity, at.heads, at.head_dim)
            k, v = (side[layer].view(shape).transpose(1, 2) for side in (kv.keys, kv.values))
        return (k, v) if count == at.capacity else (k[:, :, :count], v[:, :, :count])

    def read(self, kv: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of slots, int ``[R, T]``, as ``[R, T, H, d]`` each.

        Nothing is computed, so that what was written can be compared bit for bit. Not for a step.
        """
        at = kv.layout
        index = slots.long().view(at.rows, 1, -1, 1).expand(-1, at.heads, -1, at.head_dim)
        k, v = (t.gather(2, index).transpose(1, 2) for t in self.by_head(kv, layer, at.capacity))
        return k, v

    # --- matrix products -----------------------------------------------------------------------

    def pack(self, weight: Tensor) -> Tensor:
        """Return a weight matrix ``[out, in]`` in the memory order that :meth:`linear` wants.

        Called once a matrix when a model is loaded; what it returns replaces ``weight``. The
        reference wants it as it is.
        """
        return weight

    def unpack(self, weight: Any) -> Tensor:
        """Return the matrix ``[out, in]`` that :meth:`pack` or :meth:`pack_rounded` was given.

        It is the matrix as the device multiplies it, with whatever rounding packing brought. Needed by a
        device whose :meth:`pack` makes another one: a copy in fewer bits is made of it.
        """
        found: Tensor = weight if isinstance(weight, Tensor) else weight.dense(torch.float32)
        return found

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x [..., in]`` by a packed weight: ``[..., out]``, ``x @ weight.T + bias``.

        ``weight``: what :meth:`pack` or :meth:`pack_rounded` returned, of a matrix ``[out, in]``. The
        result has the dtype of ``x``; sums are made in float32.
        """
        return F.linear(x, weight, bias)

    def linear_add(
        self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return ``residual [..., out]`` plus the product of ``x [..., in]`` and a packed weight.

        The residual is given up: a device may put the sum in its memory. The reference leaves it.
        """
        return residual + self.linear(x, weight, bias)

    def pack_rounded(self, weight: Any, drafts: bool = False) -> Any:
        """Return a matrix in fewer bits in the order that its product wants (optional).

        ``weight`` is a :class:`~lantern_accel.nn.rounding.Rounded` matrix on this device. ``drafts``: it
        is a copy's that drafts, so that its products may round activations too: the target checks what
        comes of them. What is returned is another one, for :meth:`linear_rounded`, or anything that
        :meth:`linear` takes. The reference wants it as it is.
        """
        return weight

    def pack_fewer(self, weight: Any, how: Any, drafts: bool = False) -> Any:
        """Round a matrix and put it in the order of :meth:`pack_rounded` at once (optional).

        ``weight``: a matrix ``[out, in]``, or what :meth:`pack` returned for one; ``how``: a
        :class:`~lantern_accel.nn.rounding.Rounding`; ``drafts``: of a copy that drafts, of whose groups
        no range is cut. It gives what :func:`~lantern_accel.nn.rounding.rounded` and
        :meth:`pack_rounded` would; None where the device has nothing faster than these two. A format
        with floating-point codes is the device's own: None where it multiplies none, which refuses it.
        """
        return None

    def rounded_bits(self, how: Any) -> float:
        """Return the bits that a weight takes as :meth:`pack_rounded` keeps it (optional).

        ``how`` is a :class:`~lantern_accel.nn.rounding.Rounding`. Codes, steps and offsets by group; for
        the memory plan of a copy that drafts. The reference keeps the format's own.
        """
        bits: float = how.bits_per_weight
        return bits

    def linear_rounded(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x [..., in]`` by a matrix in fewer bits: ``[..., out]`` (recommended).

        The reference makes the whole matrix in the dtype of ``x`` first, which saves memory but no time.
        """
        return F.linear(x, weight.dense(x.dtype), bias)

    def logits(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x [..., in]`` by a head's packed weight: float32 ``[..., out]`` (optional).

        ``weight``: as :meth:`linear` takes it. The reference rounds the sums to the dtype of ``x`` first.
        A device that has them in float32 should leave them so: of what bfloat16 costs, most is lost here.
        """
        return self.linear(x, weight, bias).float()

    # --- arithmetic ----------------------------------------------------------------------------

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
        k, v = self.by_head(kv, layer, mask.shape[-1])
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

    def rotary(self, cos: Tensor, sin: Tensor) -> Any:
        """Turn rotary rows into the form that :meth:`rotate` takes; made once a pass.

        ``cos, sin`` float32, broadcasting against ``[R, T, ..., d/2]``.
        """
        return Rotary(cos.unsqueeze(-1), torch.stack((-sin, sin), dim=-1))

    def rotate(self, x: Tensor, rotary: Any) -> Tensor:
        """Rotate adjacent pairs ``(x0, x1), (x2, x3), ...`` of ``x [R, T, ..., d]`` in float32.

        ``rotary``: what :meth:`rotary` makes, or the pair that it makes it of.
        """
        return self.turned(x, rotary).to(x.dtype)

    def turned(self, x: Tensor, rotary: Any) -> Tensor:
        """Return what :meth:`rotate` does in float32, whatever the dtype of ``x``."""
        form: Rotary = rotary if isinstance(rotary, Rotary) else TensorOps.rotary(self, *rotary)
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        swapped = torch.stack((pairs[..., 1], pairs[..., 0]), dim=-1)
        # Products with float32 are float32.
        return (pairs * form.cos + swapped * form.sin).flatten(-2)

    def rotate_write(
        self, qkv: Tensor, rotary: Any, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k of ``qkv [R, T, 3, H, d]``, :meth:`write` k and v of a layer; return q."""
        turned = self.rotate(qkv[:, :, :2], rotary)
        self.write(kv, layer, address, turned[:, :, 1], qkv[:, :, 2])
        return turned[:, :, 0]

    def trunk(
        self,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        taps: Sequence[int] = (),
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Run a stack of decoder blocks on ``x [R, T, D]``, then ``norm`` where there is one.

        ``blocks`` and ``norm`` are modules of :mod:`lantern_accel.nn.transformer` or of their shape,
        Returns ``[R, T, (taps + 1) D]``: the states after the blocks ``taps``,
        counted from 1 and ascending, then the last ones. ``x`` is given up (see :meth:`linear_add`). The
        reference runs one block after another; the rotary form is made once for all.
        """
        rotary = self.rotary(at.cos.unsqueeze(2), at.sin.unsqueeze(2))
        states = []
        for i, block in enumerate(blocks):
            x = block(x, i, at, self, rotary)
            if i + 1 in taps:
                states.append(x.clone() if self.sums_in_place else x)
        states.append(x if norm is None else norm(x, self))
        return torch.cat(states, dim=-1) if taps else states[0]

    def fused_step(self, plan: StepPlan) -> FusedStep | None:
        """Return a function that does a plan's step, or what follows its pass, in the device's calls.

        Called when an engine is made, for its whole step first; where that is refused, and drafts need
        no drafter, for the plan without a target. None where the device has no kernel for the plan, or
        knows another :data:`~.plan.PLAN_VERSION`, as here: then the step runs operator by operator.
        """
        return None

    def fused_guesses(self, plan: StepPlan) -> FusedStep | None:
        """Return a function that guesses a window's drafts which no pass has seen; None: operators do.

        For plans whose window has a draft head; what a step guesses itself is :meth:`fused_step`'s.
        """
        return None

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(gate) * up [..., F]`` of ``x = [gate; up] [..., 2F]``, in the dtype of ``x``."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def flags(value: bool, *shape: int, device: torch.device) -> Tensor:
    """Return a boolean tensor ``shape`` full of ``value``.

    Filled with a number: compilers that take graphs through TorchScript leave them for a bool scalar,
    which is what ``zeros`` and ``ones`` of this dtype become.
    """
    return torch.full(shape, int(value), dtype=torch.bool, device=device)
