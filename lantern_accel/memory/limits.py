"""Checks that weights and buffers fit on a device before they are made, and says what would fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import nn

from lantern_accel.decoding.engines import engine_for
from lantern_accel.device.backend import DTYPES, Backend, MemoryUse
from lantern_accel.errors import DeviceMemoryError, DoesNotFitError
from lantern_accel.families.base import Found
from lantern_accel.memory.footprint import Shapes, weight_bytes
from lantern_accel.strategy.values import Sampling, Strategy

Part = TypeVar("Part", bound=nn.Module)


def free_bytes(use: MemoryUse) -> int | None:
    """Return what may still be allocated; None where the device does not say."""
    if use.free is not None:
        return use.free
    return None if use.limit is None else use.limit - (use.in_use or 0)


def size(nbytes: int) -> str:
    """Write a number of bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.0f} MiB"


# --- weights ------------------------------------------------------------------------------------


def weights_bytes(found: Found, dtype: torch.dtype) -> int:
    """Return what the weights of the parts that were found take on the device."""
    parts = weight_bytes(found.manifest, dtype)
    return sum(nbytes for part, nbytes in parts.items() if part in found.files)


def check_weights(backend: Backend, found: Found, dtype: torch.dtype) -> None:
    """Raise DeviceMemoryError where a model's weights are larger than the device's free memory.

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
    raise DeviceMemoryError(
        f"the model {found.manifest.name} takes {size(need)} in {_name(dtype)}, device "
        f"{backend.device} has {size(free)} free{_total(backend.memory())}; {way}, or end other "
        "programs that use it"
    )


# --- buffers ------------------------------------------------------------------------------------


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
    shapes = Shapes(backend)
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
        copy=without_memory(target),
    )
    return engine.nbytes


def most_images(needed: Callable[[int], int], free: int, limit: int) -> int:
    """Return the most images, ``limit`` at most, whose ``needed`` bytes are within ``free``; may be 0.

    ``needed`` grows with the batch, and nearly in proportion: buffers have the batch as a factor or do
    not depend on it. So the line through two known batches guesses best, and halving serves where
    the guesses do not close in.
    """
    if needed(limit) <= free:
        return limit
    if limit == 1 or needed(1) > free:
        return 0
    low, high, guesses = 1, limit, 0
    while high - low > 1:
        below, above = needed(low), needed(high)
        middle = low + (free - below) * (high - low) // max(above - below, 1)
        if guesses > 4:
            middle = (low + high) // 2
        middle, guesses = min(max(middle, low + 1), high - 1), guesses + 1
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    return low


@dataclass(frozen=True)
class Fit:
    """What a device's memory says to a batch: the images that fit, and the bytes that all need.

    ``nbytes`` and ``free`` are None where the device does not say what it has left, or where a bound
    far above the truth fits already.
    """

    asked: int
    batch: int
    nbytes: int | None = None
    free: int | None = None

    @property
    def advice(self) -> str:
        """What to do where not all fit."""
        if self.batch:
            return f"a batch of {self.batch} fits"
        return "not even one image fits; use a smaller model"

    def check(self, backend: Backend) -> None:
        """Raise :class:`DoesNotFitError` with the advice where not all images fit."""
        if self.batch < self.asked:
            raise DoesNotFitError(
                f"a batch of {self.asked} needs {size(self.nbytes or 0)} of caches and buffers, device "
                f"{backend.device} has {size(self.free or 0)} free{_total(backend.memory())}; "
                f"{self.advice}"
            )


def fit_engine(
    backend: Backend,
    target: nn.Module,
    drafter: nn.Module | None,
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
    *,
    beside: Callable[[int], int] = lambda batch: 0,
    spare: int = 0,
) -> Fit:
    """Return how many images of a batch fit, by their engine's buffers and what is ``beside`` them.

    ``spare``: bytes that are held now and can be given up.
    """
    free = free_bytes(backend.memory())
    if free is None:
        return Fit(batch, batch)

    @cache
    def needed(images: int) -> int:
        buffers = engine_bytes(backend, target, drafter, strategy, sampling, images)
        return buffers + beside(images)

    return Fit(batch, most_images(needed, free + spare, batch), needed(batch), free)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _total(use: MemoryUse) -> str:
    return "" if use.limit is None else f" of {size(use.limit)}"
