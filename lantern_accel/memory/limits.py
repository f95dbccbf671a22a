"""Checks that weights and buffers fit on a device before they are made, and says what would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lantern_accel.device.backend import DTYPES, Backend, MemoryUse
from lantern_accel.errors import DeviceMemoryError, DoesNotFitError
from lantern_accel.families.base import Found
from lantern_accel.memory.footprint import weight_bytes


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _total(use: MemoryUse) -> str:
    return "" if use.limit is None else f" of {size(use.limit)}"
