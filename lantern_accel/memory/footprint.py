"""Bytes that decoding holds at once, counted by running it on tensors without data.

Prefill, one step and the pixels of a model of two layers run on torch's ``meta`` device. Further layers
add weights and cache, which are computed, but no workspace.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lantern_accel.checkpoints.loading import without_data
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.kv_cache import KVLayout
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.base import PARTS, Family, Model
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.registry import family
from lantern_accel.nn.draft_head import empty_head
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import projections
from lantern_accel.records import Frozen
from lantern_accel.strategy.values import Sampling, Strategy

META = torch.device("meta")
#: Layers of the model that is traced.
TRACED_LAYERS = 2


class Footprint(Frozen):
    """Bytes by holder: ``weights`` by part, ``buffers`` (caches, state), ``tables``, ``workspace``.

    ``workspace`` has the most that each phase (``prefill``, ``step``, ``pixels``) holds beyond the rest.
    """

    weights: dict[str, int]
    buffers: int
    tables: int
    workspace: dict[str, int]


class Shapes(TensorOps):
    """Operations whose buffers have a shape and no memory, in the layout of ``ops``' device."""

    device = META

    def __init__(self, ops: TensorOps | None = None) -> None:
        self._ops = ops or TensorOps()
        self.index, self.preferences = self._ops.index, self._ops.preferences

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        return self._ops.kv_layout(layers, rows, capacity, heads, head_dim, dtype)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages made inside the block; ``peak`` is the most that was alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive = 0
        self._known: dict[int, int] = {}

    def _meet(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known[key] = size
        weakref.finalize(storage, self._forget, key)
        self._alive += size
        self.peak = max(self.peak, self._alive)

    def _forget(self, key: int) -> None:
        self._alive -= self._known.pop(key, 0)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._meet(given, counts=False)  # it was there before the block
        out = func(*args, **kwargs)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._meet(made, counts=True)
        return out


def module_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of a module's parameters in ``dtype``, and of its tables as they are."""
    state = module.state_dict()
    weights: int = sum(value.numel() for value in state.values()) * dtype.itemsize
    tables: int = sum(
        buffer.numel() * buffer.dtype.itemsize
        for name, buffer in module.named_buffers()
        if name not in state
    )
    return weights + tables


def _build(kind: Family, manifest: Manifest, part: str, dtype: torch.dtype) -> nn.Module:
    with without_data():
        module = kind.build(manifest, part, Shapes()).to(dtype)
    kind.place_tables(module, META)
    return module.eval().requires_grad_(False)


def weight_bytes(manifest: Manifest, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of every part's weights and tables; the image tokenizer is float32."""
    kind, out, fields = family(manifest.family), {}, dict(manifest)
    for part in PARTS:
        if fields[part] is not None:
            to = torch.float32 if part == "vq" else dtype
            out[part] = module_bytes(_build(kind, manifest, part, to), to)
    if (head := empty_head(manifest.draft_head)) is not None:
        out["draft_head"] = module_bytes(head, torch.float32)
    return out


def copy_bytes(target: nn.Module, weights: str, ops: TensorOps | None = None) -> int:
    """Return the bytes of a quantized copy of a target, to draft with, as ``ops`` keep them."""
    numbers = sum(part.weight.numel() for part in projections(target))
    how, least = rounding(weights), (ops or TensorOps()).preferences.code_bits
    return int(numbers * (how.bits_per_weight + max(0, least - how.bits)) / 8)


def saved_bytes(
    manifest: Manifest, weights: str, dtype: torch.dtype, ops: TensorOps | None = None
) -> int:
    """Return how many bytes fewer a target takes than in ``dtype`` if its weights are quantized."""
    target = _build(family(manifest.family), manifest, "target", dtype)
    whole = sum(part.weight.numel() for part in projections(target)) * dtype.itemsize
    return whole - copy_bytes(target, weights, ops)


def measure(
    kind: Family,
    manifest: Manifest,
    strategy: Strategy,
    sampling: Sampling,
    *,
    batch: int,
    dtype: torch.dtype,
    ops: TensorOps | None = None,
    shape: Hashable = None,
) -> Footprint:
    """Return what decoding ``batch`` images at once holds, without allocating it.

    ``ops``: an open device's, whose layout buffers have; None: the reference's. ``shape``: of the
    image; None: the usual one.
    """
    layers = manifest.target.n_layer
    taps = len(getattr(manifest.drafter, "taps", ()))
    traced = min(max(TRACED_LAYERS, taps), layers)
    parts = {"target": manifest.target.model_copy(update={"n_layer": traced})}
    if taps:  # which blocks they are does not matter, but all must be there
        update = {"taps": tuple(range(1, taps + 1))}
        parts["drafter"] = manifest.drafter.model_copy(update=update)
    small = manifest.model_copy(update=parts)
    drafts = strategy.needs_drafter
    target: Any = _build(kind, small, "target", dtype)
    target.draft_head = empty_head(small.draft_head)
    drafter = _build(kind, small, "drafter", dtype) if drafts else None
    vq = _build(kind, small, "vq", torch.float32)
    model = Model(small, target, drafter, vq, None, "", kind)
    workspace: dict[str, int] = {}
    with torch.inference_mode(), META:
        asked = kind.usual_shape(model) if shape is None else shape
        fitted = kind.target_for_shape(model, asked)
        table = None
        if strategy.neighbours:
            rows = fitted[0].config.vocab_size
            table = torch.zeros(rows, strategy.neighbours, dtype=torch.int32)

        def engine_on(layout: TensorOps | None) -> Engine:
            shapes = Shapes(layout)
            shapes.preferences = (ops or shapes).preferences
            parts = (*fitted, shapes, strategy, sampling)
            return Engine(*parts, batch=batch, neighbours=table, copy=fitted[0])

        engine = engine_on(None)
        held = engine if ops is None else engine_on(ops)
        together = min(batch, kind.pixels_together(model) or batch)
        tokens = torch.zeros(together, engine.geometry.tokens, dtype=torch.int64)
        phases: dict[str, Callable[[], object]] = {
            "prefill": engine.prefill,
            "step": engine.step,
            "pixels": lambda: kind.pixels(model, tokens, asked),
        }
        for name, run in phases.items():
            with LiveBytes() as live:
                out = run()
            workspace[name] = live.peak
            if isinstance(out, Tensor):  # the finished images wait for the others
                workspace[name] += (batch - together) * out.numel() // together
    weights = weight_bytes(manifest, dtype)
    if (quantized := strategy.drafts.copy_weights) is not None:
        whole = _build(kind, manifest, "target", dtype)
        weights["copy"] = copy_bytes(whole, quantized, ops)
    cache = held.verifying.cache.layout.nbytes
    full = cache // traced * layers
    return Footprint(
        weights=weights,
        buffers=held.nbytes - cache + full,
        tables=0 if table is None else table.numel() * table.dtype.itemsize,
        workspace=workspace,
    )
