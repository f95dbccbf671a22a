"""The native operations on tensors; :class:`Kernels` is what an opened CPU calls.

Each says first whether it takes its tensors: a fake tensor, a dtype without a kernel, or a tensor on its
way to a gradient goes the reference's way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, byref
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.kv_cache import KVCache
from lantern_accel.nn.rounding import TRIES, Rounding
from lantern_accel_cpu import pages
from lantern_accel_cpu.native.library import PANEL, Library
from lantern_accel_cpu.native.rounded import KEPT, RoundedPanels
from lantern_accel_cpu.native.structures import (
    Attend,
    Cache,
    Copy,
    Linear,
    Mask,
    Rotary,
    RotateWrite,
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
#: What an address says of weights in integers of 16 bits, as the kernels have it.
WORDS = 4


class Panels(Tensor):
    """A weight matrix ``[out, in]`` in the kernels' order; as a tensor it has only the right shape.

    Its memory goes on to whole panels of 32 rows, filled with zeros.
    """

    # As torch's own Parameter has it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def address(self) -> int:
        """Where it lies, and how it is kept, as the kernels take it."""
        return self.data_ptr()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as it was before it was packed."""
        n, k = self.shape
        group = 2 if self.dtype == torch.bfloat16 else 1
        deep, panels = -(-k // group), -(-n // PANEL)
        plain = self.as_subclass(Tensor)
        whole = plain.as_strided(
            (panels, deep, PANEL, group), (deep * PANEL * group, PANEL * group, group, 1)
        )
        return (
            whole.transpose(1, 2)
            .reshape(panels * PANEL, deep * group)[:n, :k]
            .to(dtype)
            .contiguous()
        )


class WordPanels(Panels):
    """A matrix of bfloat16 as integers of 16 bits, for units that multiply these (``words.h``)."""

    @property
    def address(self) -> int:
        return self.data_ptr() + WORDS

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as it is multiplied: small weights are off by 2^-14 of a row's largest."""
        n, k = self.shape
        deep, panels = -(-k // 2), -(-n // PANEL)
        plain, size = self.as_subclass(Tensor), word_panel(k)
        whole = plain.as_strided((panels, size), (size, 1))
        steps = whole[:, : 2 * PANEL].contiguous().view(torch.float32).view(panels, PANEL, 1)
        codes = whole[:, 2 * PANEL :].contiguous().view(torch.int16).view(panels, deep, PANEL, 2)
        weights = codes.transpose(1, 2).reshape(panels, PANEL, 2 * deep) * steps
        return weights.view(panels * PANEL, 2 * deep)[:n, :k].to(torch.bfloat16).to(dtype)


def word_panel(inputs: int) -> int:
    """Return the numbers of 16 bits in a panel of :class:`WordPanels`: its steps, then its codes."""
    return PANEL * (2 + 2 * -(-inputs // 2))


def takes(weight: object, dtype: torch.dtype) -> TypeGuard[Panels | RoundedPanels]:
    """Return whether the kernels multiply activations of a dtype by this packed weight."""
    if isinstance(weight, RoundedPanels):
        return dtype in DTYPES
    return isinstance(weight, Panels) and weight.dtype == dtype


def real(*tensors: Tensor) -> bool:
    """Return whether these are plain tensors in this process's memory, of a dtype with kernels."""
    return all(type(t) is Tensor and t.dtype in DTYPES and t.device.type == "cpu" for t in tensors)


def native(x: Tensor) -> bool:
    """Return whether a kernel may take this tensor: a real one, on no way to a gradient."""
    return real(x) and not x.requires_grad


def lies(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Return whether these lie in this process's memory in one piece each, of a dtype."""
    return all(
        type(t) in (Tensor, torch.nn.Parameter)
        and t.dtype == dtype
        and t.device.type == "cpu"
        and t.is_contiguous()
        for t in tensors
    )


def cache_of(kv: KVCache) -> Structure:
    """Describe a layer's keys or values, ordered by head: ``[R * H * L, d]``."""
    at = kv.layout
    head = at.capacity * at.head_dim
    return Cache(at.heads * head, head, at.head_dim, at.heads, at.head_dim)


def mask_of(mask: Tensor, rows: int) -> Structure:
    """Describe a boolean mask ``[R or 1, 1, T, L]`` whose slots are neighbours."""
    return Mask(
        mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2),
        rows, mask.shape[2], mask.shape[3],
    )  # fmt: skip


class Kernels:
    """The native operations of one opened CPU."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._threads = 0
        self._alone = False
        #: Threads of these kernels where torch has another number; None: as many as torch.
        self._own: int | None = None
        #: Draft heads in panels, by address and dtype (guesses.py).
        self.heads: dict[tuple[int, torch.dtype], tuple[tuple[Panels, ...], Tensor, object]] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let torch compute on one thread, and these kernels on as many as it had."""
        count = torch.get_num_threads()
        if count == 1 or self._alone:
            yield
            return
        self.threads()
        try:
            self._alone = True
            torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(count)
            self._alone = False

    def count(self) -> int:
        """Return how many threads these kernels use outside :meth:`alone`."""
        return self._own or torch.get_num_threads()

    def after_fork(self) -> None:
        """Keep the number of threads in a child of ``fork``, whose torch computes on one."""
        # Where the fork came during a step, torch has one thread already.
        self._own = self._own or max(self._threads, torch.get_num_threads())
        self._alone = False

    def threads(self) -> None:
        """Use as many threads as torch does outside :meth:`alone`."""
        count = self.count()
        if count != self._threads and not self._alone:
            self._threads = count
            self.library.threads(count)

    # --- products ------------------------------------------------------------------------------

    def packs(self, weight: Tensor) -> bool:
        """Return whether there is a kernel for this weight matrix."""
        plain = type(weight) in (Tensor, torch.nn.Parameter)
        return (
            plain
            and weight.dim() == 2
            and weight.dtype in DTYPES
            and weight.device.type == "cpu"
            and weight.numel() > 0
        )

    def pack(self, weight: Tensor, words: bool = True) -> Panels:
        """Return ``weight [out, in]`` in panels; without ``words`` its numbers stay as they are."""
        self.threads()
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        n, k = weight.shape
        if words and weight.dtype == torch.bfloat16 and self.library.takes_words():
            out = pages.zeros((-(-n // PANEL) * word_panel(k),), weight.dtype)
            self.library.pack_words(weight.data_ptr(), weight.stride(0), k, n, out.data_ptr())
            return out.as_strided((n, k), (k, 1)).as_subclass(WordPanels)
        group = 2 if weight.dtype == torch.bfloat16 else 1
        size = -(-n // PANEL) * PANEL * -(-k // group) * group
        out = pages.zeros((size,), weight.dtype)
        kind = DTYPES[weight.dtype]
        self.library.pack(weight.data_ptr(), weight.stride(0), k, n, kind, out.data_ptr())
        return out.as_strided((n, k), (k, 1)).as_subclass(Panels)

    def linear(
        self, x: Tensor, weight: Panels | RoundedPanels, bias: Tensor | None, sums: bool = False
    ) -> Tensor:
        """Multiply ``x [..., in]`` by a packed weight; ``sums``: return them in float32, as they are."""
        if not real(x) or not takes(weight, x.dtype) or x.shape[-1] != weight.shape[1]:
            out = F.linear(x, weight.dense(x.dtype), bias)
            return out.float() if sums else out
        self.threads()
        n, k = weight.shape
        flat = x.reshape(-1, k)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        y = x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if sums else x.dtype)
        bias = bias if bias is None else bias.contiguous()
        given = Linear(
            flat.data_ptr(), weight.address, None if bias is None else bias.data_ptr(), y.data_ptr(),
            flat.stride(0), flat.shape[0], k, n, DTYPES[x.dtype], int(sums),
        )  # fmt: skip
        self.library.linear(byref(given))
        return y

    def in_fewer_bits(self, weight: Panels, how: Rounding, drafts: bool) -> RoundedPanels:
        """Return a packed quantized matrix; no range of a group is cut where it ``drafts``."""
        self.threads()
        n, k = weight.shape
        made = RoundedPanels.empty(how, (n, k), drafts)
        given = Copy(
            weight.address, made.panels.data_ptr(), k, n, DTYPES[weight.dtype], KEPT[how.bits],
            1 if drafts else TRIES,
        )  # fmt: skip
        self.library.copy(byref(given))
        return made

    # --- arithmetic ----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Normalise and scale in float32; None where there is no kernel for it."""
        if not native(x) or weight.dtype != x.dtype:
            return None
        x = x.contiguous()
        y = torch.empty_like(x)
        n = x.shape[-1]
        self.library.rms_norm(
            x.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n, y.data_ptr(), DTYPES[x.dtype]
        )
        return y

    def swiglu(self, x: Tensor) -> Tensor | None:
        """``silu(gate) * up`` of ``x = [gate; up]``; None where there is no kernel for it."""
        if not native(x):
            return None
        x = x.contiguous()
        hidden = x.shape[-1] // 2
        y = x.new_empty((*x.shape[:-1], hidden))
        self.library.swiglu(
            x.data_ptr(), y.numel() // hidden, hidden, y.data_ptr(), DTYPES[x.dtype]
        )
        return y

    # --- the cache -----------------------------------------------------------------------------

    def write(self, kv: KVCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [R, T, H, d]`` of one layer in ``slots``, int64 ``[R, T]``."""
        to = cache_of(kv)
        for side, given in ((kv.keys[layer], k.contiguous()), (kv.values[layer], v.contiguous())):
            self.library.store(
                byref(to), side.data_ptr(), given.data_ptr(), slots.data_ptr(), *slots.shape,
                kv.layout.dtype.itemsize,
            )  # fmt: skip

    def attend(self, q: Tensor, kv: KVCache, layer: int, mask: Tensor) -> Tensor:
        """Attention of ``q [R, T, H, d]`` over the slots that a boolean mask lets it see."""
        self.threads()
        q, mask = q.contiguous(), mask.contiguous()
        out = torch.empty_like(q)
        k, v = kv.keys[layer], kv.values[layer]
        given = Attend(
            cache_of(kv), mask_of(mask, q.shape[0]), q.data_ptr(), k.data_ptr(), v.data_ptr(),
            out.data_ptr(), DTYPES[q.dtype],
        )  # fmt: skip
        self.library.attend(byref(given))
        return out

    def rotate_write(
        self, qkv: Tensor, rotary: object, kv: KVCache, layer: int, address: Tensor
    ) -> Tensor | None:
        """Rotate q and k of ``qkv [R, T, 3, H, d]``, store k and v; return q, None without a kernel."""
        if not isinstance(rotary, tuple) or not native(qkv) or qkv.dtype != kv.layout.dtype:
            return None
        qkv = qkv.contiguous()
        rows, count, _, heads, width = qkv.shape
        q = qkv.new_empty((rows, count, heads, width))
        k, v = kv.keys[layer], kv.values[layer]
        cos, sin = rotary
        held = rotary_of(cos, sin, rows, count)
        given = RotateWrite(
            cache_of(kv), held[0], qkv.data_ptr(), k.data_ptr(), v.data_ptr(), q.data_ptr(),
            address.data_ptr(), rows, count, DTYPES[qkv.dtype],
        )  # fmt: skip
        self.library.rotate_write(byref(given))
        return q


def rotary_of(cos: Tensor, sin: Tensor, rows: int, count: int) -> tuple[Structure, Any]:
    """Describe rotary rows ``[R or 1, T, ..., d/2]``, and return what must outlive the description."""
    half = cos.shape[-1]
    cos, sin = (t.reshape(t.shape[0], count, half).float().contiguous() for t in (cos, sin))
    return Rotary(cos.data_ptr(), sin.data_ptr(), count * half if cos.shape[0] > 1 else 0), (
        cos,
        sin,
    )
