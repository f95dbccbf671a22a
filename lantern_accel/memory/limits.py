"""Whether weights and buffers fit on a device, told before they are made, with what would fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from lantern_accel.checkpoints.loading import without_data
from lantern_accel.decoding.engines import engine_for
from lantern_accel.device.backend import DTYPES, Backend, MemoryUse
from lantern_accel.device.operations import KVLayout, TensorOps
from lantern_accel.errors import BackendError, DoesNotFitError
from lantern_accel.families.base import PARTS, Found
from lantern_accel.families.registry import family
from lantern_accel.strategy.values import Sampling, Strategy

Part = TypeVar("Part", bound=nn.Module)
#: Parts of a model that are computed in the request's dtype; the others stay in float32.
COMPUTED = ("target", "drafter")


def free_bytes(use: MemoryUse) -> int | None:
    """Return what may still be allocated; None where the device does not say."""
    if use.free is not None:
        return use.free
    return None if use.limit is None else use.limit - (use.in_use or 0)


def size(nbytes: int) -> str:
    """Write a number of bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.0f} MiB"


# --- weights ------------------------------------------------------------------------------------


def part_bytes(manifest: Any, dtype: torch.dtype) -> dict[str, int]:
    """Return what the weights of every part take: target and drafter in ``dtype``, else float32."""
    kind = family(manifest.family)
    out = {}
    for part in PARTS:
        if getattr(manifest, part) is None:
            continue
        with without_data():
            module = kind.build(manifest, part, TensorOps())
        width = dtype if part in COMPUTED else torch.float32
        out[part] = sum(value.numel() for value in module.state_dict().values()) * width.itemsize
    return out


def weights_bytes(found: Found, dtype: torch.dtype) -> int:
    """Return what the weights of the parts that were found take on the device."""
    parts = part_bytes(found.manifest, dtype)
    return sum(nbytes for part, nbytes in parts.items() if part in found.files)


def check_weights(backend: Backend, found: Found, dtype: torch.dtype) -> None:
    """Raise BackendError where a model's weights are larger than the device's free memory.

    Names the dtypes that would fit.
    """
    free = free_bytes(backend.memory())
    need = weights_bytes(found, dtype)
    if free is None or need <= free:
        return
    others = [
        f"{name} ({size(weights_bytes(found, other))})"
        for name, other in DTYPES.items()
        if other in backend.compute_dtypes() and weights_bytes(found, other) <= free
    ]
    way = f"use the dtype {' or '.join(others)}" if others else "use a device with more memory"
    raise BackendError(
        f"the model {found.manifest.name} takes {size(need)} in {_name(dtype)}, device "
        f"{backend.device} has {size(free)} free{_total(backend.memory())}; {way}, or end other "
        "programs that use it"
    )


# --- buffers ------------------------------------------------------------------------------------


class _Shapes(TensorOps):
    """Buffers that have a shape and no memory, in the layout of a device."""

    device = torch.device("meta")

    def __init__(self, ops: TensorOps) -> None:
        self._ops = ops

    def kv_layout(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVLayout:
        return self._ops.kv_layout(layers, rows, capacity, heads, head_dim, dtype)


def without_memory(module: Part) -> Part:
    """Copy a module onto the ``meta`` device."""
    tensors = [*module.parameters(), *module.buffers()]
    memo = {
        id(t): nn.Parameter(t.to("meta"), requires_grad=False)
        if isinstance(t, nn.Parameter)
        else t.to("meta")
        for t in tensors
    }
    for part in module.modules():
        packed = vars(part).get("packed")
        if packed is not None:  # a weight in the device's order; its shape is the parameter's
            memo[id(packed)] = None  # type: ignore[assignment]
    ops = vars(module).get("ops")
    if ops is not None:
        memo[id(ops)] = ops
    return copy.deepcopy(module, memo)


def engine_bytes(
    backend: Backend,
    target: nn.Module,
    drafter: nn.Module | None,
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
) -> int:
    """Return the bytes of an engine's caches and state on this device, without making them."""
    meta = torch.device("meta")
    shapes = _Shapes(backend)
    vocab: int = target.config.vocab_size  # type: ignore[assignment, union-attr]
    table = torch.empty(vocab, strategy.neighbours, dtype=torch.int32, device=meta)
    engine = engine_for(
        without_memory(target),
        None if drafter is None else without_memory(drafter),
        shapes,
        strategy,
        sampling,
        batch=batch,
        neighbours=table if strategy.neighbours else None,
    )
    return engine.nbytes


def check_engine(
    backend: Backend,
    target: nn.Module,
    drafter: nn.Module | None,
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
    beside: Callable[[int], int] = lambda batch: 0,
) -> None:
    """Raise BackendError where an engine's buffers are larger than the free memory.

    ``beside``: what a batch takes beside its buffers. Names the largest batch that fits.
    """
    free = free_bytes(backend.memory())
    if free is None:
        return

    def needed(images: int) -> int:
        buffers = engine_bytes(backend, target, drafter, strategy, sampling, images)
        return buffers + beside(images)

    need = needed(batch)
    if need <= free:
        return
    one = needed(1)
    # Every buffer has the batch as a factor, or does not depend on it.
    each = (need - one) / max(batch - 1, 1)
    fits = 1 + int((free - one) / each) if free >= one and each > 0 else 0
    way = f"a batch of {fits} fits" if fits else "not even one image fits; use a smaller model"
    raise DoesNotFitError(
        f"a batch of {batch} needs {size(need)} of caches and buffers, device {backend.device} has "
        f"{size(free)} free{_total(backend.memory())}; {way}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _total(use: MemoryUse) -> str:
    return "" if use.limit is None else f" of {size(use.limit)}"
