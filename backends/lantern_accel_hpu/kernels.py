"""The tensor operations as a Gaudi wants them; each fused kernel has the plain operators next to it.

The plain path computes the same numbers and runs where there is no Habana SDK: on the software HPU, and
with ``fused=false``. It keeps to operators that have an HPU kernel: no advanced indexing,
no ``scaled_dot_product_attention`` (it becomes ``_safe_softmax``, which has none), no complex numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lantern_accel.device.kv_cache import KVCache, KVLayout
from lantern_accel.device.operations import Rotary, TensorOps, rotate_float32
from lantern_accel.device.packed import Format, Weight, dense
from lantern_accel.device.plan import Filter
from lantern_accel.device.preferences import Preferences
from lantern_accel.device.sampling import Tables
from lantern_accel.nn.rounding import Rounded, Rounding
from lantern_accel_hpu.bridge import Kernels
from lantern_accel_hpu.counting import COUNTED, Bars, bars, kth_largest
from lantern_accel_hpu.environment import INT32_FROM, numbers
from lantern_accel_hpu.floats import Floats, multiplies_floats
from lantern_accel_hpu.rounded import ByteCodes

#: Slots of a cache are a multiple of this, so that attention's matrices fill the matrix engine
#: (vllm-gaudi's block size; smaller ones run "very inefficiently" there).
SLOTS = 128


#: Noise of up to 512 MiB is made once per image: what a step launches costs more than what it reads.
#: Single allocations of gigabytes were seen to fail on cards with most of their memory free.
NOISE_BYTES = 512 << 20
#: Rows of a pass that cost about as much as one: from 176 on products take longer than weights (432
#: TFLOPS over 2.46 TB/s in bfloat16), and the matrix engine's tiles have 128.
FREE_ROWS = 128


def index_dtype() -> torch.dtype:
    """Return int32, which Gaudi's kernels take, where this torch takes it too; else int64."""
    return torch.int32 if numbers(torch.__version__) >= INT32_FROM else torch.int64


def recomputes(queries: int) -> bool:
    """Return whether FusedSDPA shall take its kernel that keeps no scores.

    It is the bridge's default for attention without gradients. For one query the scores are a row, and
    the vendor's own models ask for the other kernel there, as long as nothing is quantized; newer
    wrappers recompute there whatever they are asked for.
    """
    return queries > 1


@dataclass(frozen=True)
class Wide:
    """Rotary rows for one pass as the kernel takes them.

    ``cos, sin``: each element twice, float32 ``[1, R*T or T, 1, d]``.
    """

    cos: Tensor
    sin: Tensor


class HPUOps(TensorOps):
    """Cache, attention, norm and rotary positions for ``hpu``; ``kernels`` are the fused ones."""

    kernels: Kernels = Kernels()
    index: torch.dtype = index_dtype()
    preferences = Preferences(
        compiles=True, free_rows=FREE_ROWS, code_bits=8, noise_bytes=NOISE_BYTES
    )
    reinplaces: bool = False
    """Whether ``hpu_backend`` keeps several ``index_copy_`` to one buffer: releases from 1.24 on."""

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        """Order caches by head, and round the slots up to what the matrix engine fills."""
        slots = -(-capacity // SLOTS) * SLOTS
        return KVLayout(layers, rows, slots, heads, head_dim, dtype, head_major=True)

    def address(self, kv: KVCache, slots: Tensor) -> Tensor:
        """Return where slots ``[R, T]`` lie: flat indices of (row, head, slot), ``[R * H * T]``.

        Heads come before positions, as attention has them. int64, because ``index_copy_`` takes no
        other index in torch's own rules for shapes, which the compiler follows; the device's index dtype
        for a cache that :meth:`write` scatters into.
        """
        at, first = kv.layout, kv.first
        if first is None:
            first = at.pieces(self.device, self.index)
        flat = (first.view(at.rows, at.heads, 1) + slots.unsqueeze(1)).reshape(-1)
        return flat if self._scatters(at) else flat.long()

    def _scatters(self, layout: KVLayout) -> bool:
        return layout.rewritten and not self.reinplaces

    def write(self, kv: KVCache, layer: int, address: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer at ``address``.

        ``hpu_backend`` makes an ``index_copy_`` in place, and before release 1.24 loses all but the first
        of several in one graph (its pass ``use_inplace_index_copy``). There a cache that is rewritten is
        scattered into instead, which that pass leaves alone, and copied with every write.
        """
        for buffer, new in zip((kv.keys[layer], kv.values[layer]), (k, v), strict=True):
            flat = new.transpose(1, 2).reshape(-1, new.shape[-1])
            if self._scatters(kv.layout):
                buffer.scatter_(0, address.unsqueeze(-1).expand(flat.shape), flat)
            else:
                buffer.index_copy_(0, address, flat)

    def pack(self, weight: Weight, form: Format | None = None, drafts: bool = False) -> Weight:
        """Keep one code a byte (:mod:`lantern_accel_hpu.rounded`), or floats of 8 bits where it can."""
        if isinstance(form, Rounding) and form.floating and drafts and multiplies_floats():
            return Floats.of(form, dense(weight))
        return (
            ByteCodes.of(weight)
            if isinstance(weight, Rounded)
            else super().pack(weight, form, drafts)
        )

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, sums: bool = False
    ) -> Tensor:
        """Multiply by a weight, or by a packed quantized one."""
        if isinstance(weight, ByteCodes | Floats):
            out = weight.product(x, bias)
            return out.float() if sums else out
        return super().linear(x, weight, bias, sums)

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over a layer's first L slots under ``mask [R, 1, T, L]``."""
        k, v = kv.by_head(layer, mask.shape[-1])
        return self._attend(q.transpose(1, 2), k, v, mask).transpose(1, 2)

    def attend_dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention, scale ``d ** -0.5``; ``k, v [R, L, H, d]``; ``mask=None`` is causal."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._attend(q, k, v, mask).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention with heads first: ``q [R, H, T, d]``, ``k, v [R, H, L, d]``.

        Without the kernel the softmax is in float32.
        """
        scale = q.shape[-1] ** -0.5
        if self.kernels.sdpa is not None:
            # Causal and a mask exclude each other there; a tree's mask says all there is to say.
            # The mode of recomputing is said: left out, the wrapper asks the bridge for it, in a module
            # that Dynamo does not trace, and a step would not be one graph.
            # Of the softmax, ``fast`` rounds more than a comparison of distributions should.
            softmax = self.kernels.softmax if q.dtype == torch.bfloat16 else Kernels.softmax
            out: Tensor = self.kernels.sdpa.apply(
                q, k, v, mask, 0.0, mask is None, scale, softmax, recomputes(q.shape[2])
            )
            return out
        if mask is None:
            steps = torch.arange(k.shape[2], device=q.device, dtype=torch.int32)
            visible = steps <= steps[k.shape[2] - q.shape[2] :].unsqueeze(-1)
            mask = self.mask(visible, q.dtype)
        scores = self._scores(q, k, mask, scale)
        return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Return ``scale * q k + mask``, ``[R, H, T, L]``."""
        rows, heads, steps, width = q.shape
        if mask.dim() != 4 or (len(mask) > 1 and mask.stride(0)):
            return torch.matmul(q * scale, k.transpose(2, 3)) + mask
        # Of one mask for all rows every head's is a view.
        flat = mask[:1].expand(rows, heads, -1, -1).reshape(rows * heads, steps, -1)
        q, k = q.reshape(-1, steps, width), k.reshape(-1, k.shape[2], width)
        scores = torch.baddbmm(flat, q, k.transpose(1, 2), alpha=scale)
        return scores.view(rows, heads, steps, -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise in float32 and scale.

        The kernel rounds once, after scaling, where the reference rounds before as well: in bfloat16
        the two differ by a rounding, in float32 not.
        """
        if self.kernels.rms_norm is None or x.dtype != weight.dtype:
            return super().rms_norm(x, weight, eps)
        # The kernel takes three axes.
        flat = x.reshape(-1, *x.shape[-2:]) if x.dim() > 2 else x.unsqueeze(0)
        out: Tensor = self.kernels.rms_norm.apply(flat, weight, eps)
        return out.view(x.shape)

    def rotary(self, cos: Tensor, sin: Tensor) -> object:
        """Write every element of rotary rows twice for the kernel, once for each of a pair."""
        if self.kernels.rotary is None:
            # [R, T, 1, ..., d/2] -> [R, T, 1, d/2]: with pairs, no more axes than a kernel takes.
            return Rotary.of(*(one.reshape(*one.shape[:2], 1, -1) for one in (cos, sin)))
        width = 2 * cos.shape[-1]
        # [R, T, 1, ..., d/2] -> [1, R*T, 1, d]: the kernel takes one row of angles a position.
        wide = [torch.stack((x, x), dim=-1).reshape(1, -1, 1, width) for x in (cos, sin)]
        return Wide(wide[0], wide[1])

    def rotate(self, x: Tensor, rotary: object) -> Tensor:
        """Rotate adjacent pairs ``(x0, x1), (x2, x3), ...`` of ``x [R, T, ..., d]`` in float32."""
        if not isinstance(rotary, Wide):
            return rotate_float32(x.flatten(2, -2), rotary).view(x.shape).to(x.dtype)
        cos, sin = rotary.cos, rotary.sin
        # Angles of one row for all rows of x, or of each row: then rows and positions are one axis.
        rows, steps = (x.shape[0], x.shape[1]) if cos.shape[1] == x.shape[1] else (1, cos.shape[1])
        flat = x.float().reshape(rows, steps, -1, x.shape[-1])
        out: Tensor = self.kernels.rotary(flat, cos, sin, None, 0, self.kernels.pairwise)
        return out.view(x.shape).to(x.dtype)

    def rotate_write(
        self, qkv: Tensor, rotary: object, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor:
        """Rotate q and k of ``qkv [R, T, 3, H, d]``, :meth:`write` k and v of a layer; return q.

        What is rotated is put in the order of attention, heads first, where its dtype changes anyway.
        """
        if isinstance(rotary, Wide):
            return super().rotate_write(qkv, rotary, kv, layer, address)
        given = qkv[:, :, :2]
        both = rotate_float32(given.flatten(2, 3), rotary).view(given.shape).permute(2, 0, 3, 1, 4)
        both = both.to(qkv.dtype, memory_format=torch.contiguous_format).contiguous()
        q, k = both.transpose(2, 3).unbind(0)
        self.write(kv, layer, address, k, qkv[:, :, 2])
        return q

    def snapshot(self, buffer: Tensor) -> Tensor:
        """Copy a buffer: torch's fuser may list a short way to a write before a long way to a reader."""
        return buffer.clone()

    def put(self, buffer: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
        """Write entries of a buffer, all of it in one write: an HPUGraph records none to a view."""
        whole = buffer.flatten(dim, dim + 1).index_copy(dim, index.long(), values)
        buffer.copy_(whole.view(buffer.shape))

    def tables(self, size: int, device: torch.device) -> Tables:
        """Add the bars that values are compared with to count a large top-k."""
        return replace(super().tables(size, device), filter=bars(device))

    def filter(self, logits: Tensor, given: Filter, tables: object | None = None) -> Tensor:
        """Return the float32 probabilities ``[..., V]`` of a filter; a large top-k is counted."""
        k, p = given.top_k, given.top_p
        if not COUNTED <= k < logits.shape[-1] or (p is not None and not given.p_first):
            return super().filter(logits, given)
        x = logits / given.temperature
        if p is not None:
            x = self._keep_top_p(x, p)
        assert tables is None or isinstance(tables, Bars)
        never = float("-inf") if given.never is None else given.never
        # Values equal to the k-th stay, as in the reference.
        return torch.where(x < kth_largest(x, k, tables), never, x).softmax(dim=-1)
