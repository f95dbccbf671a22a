"""Checks that weights, and the buffers of a batch, fit on a device, and says what would fit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from lantern_accel.device.backend import DTYPES, Backend, MemoryUse
from lantern_accel.errors import DeviceMemoryError, DoesNotFitError
from lantern_accel.families.base import Found, Model
from lantern_accel.memory.footprint import copy_bytes, weight_bytes
from lantern_accel.memory.plan import Planner, most_images
from lantern_accel.records import format_bytes
from lantern_accel.strategy.values import Sampling, Strategy

#: Taken for pixels and everything else where only a rough bound is wanted.
ROUGH_REST = 2 * 10**9


# --- weights ------------------------------------------------------------------------------------


def weights_bytes(found: Found, dtype: torch.dtype) -> int:
    """Return what the weights of the parts that were found take on the device."""
    parts = weight_bytes(found.manifest, dtype)
    return sum(nbytes for part, nbytes in parts.items() if part in found.files)


def check_weights(backend: Backend, found: Found, dtype: torch.dtype) -> None:
    """Raise DeviceMemoryError where a model's weights are larger than the device's free memory.

    Names the dtypes that would fit.
    """
    free = backend.memory().left
    need = weights_bytes(found, dtype)
    if free is None or need <= free:
        return
    others = [
        f"{name} ({format_bytes(weights_bytes(found, other))})"
        for name, other in DTYPES.items()
        if other in backend.compute_dtypes() and weights_bytes(found, other) <= free
    ]
    way = f"use the dtype {' or '.join(others)}" if others else "use a device with more memory"
    raise DeviceMemoryError(
        f"the model {found.manifest.name} takes {format_bytes(need)} in "
        f"{str(dtype).removeprefix('torch.')}, device {backend.device} has {format_bytes(free)} free"
        f"{_total(backend.memory())}; {way}, or end other programs that use it"
    )


# --- buffers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """What a device's memory says to a batch: the images that fit, and the bytes that all need.

    ``nbytes`` is a bound far above the truth where that fits already; ``free`` is None where the device
    does not say what it has left.
    """

    asked: int
    batch: int
    nbytes: int
    free: int | None

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
                f"a batch of {self.asked} needs {format_bytes(self.nbytes)} of caches and buffers, "
                f"device {backend.device} has {format_bytes(self.free or 0)} free"
                f"{_total(backend.memory())}; {self.advice}"
            )


def _total(use: MemoryUse) -> str:
    return "" if use.limit is None else f" of {format_bytes(use.limit)}"


class Capacity:
    """Estimates for one loaded model on one device how many images fit together."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model, self.backend, self.dtype = model, backend, dtype
        #: Weights of the copies to draft with that are held already.
        self.copies: frozenset[str] = frozenset()
        self._planner = Planner(model.manifest, dtype=dtype, runtime=0, ops=backend)

    def copy_bytes(self, strategy: Strategy) -> int:
        """Return the bytes of the copy that a strategy drafts with, 0 where it is held or none."""
        weights = strategy.drafts.copy_weights
        if weights is None or weights in self.copies:
            return 0
        return copy_bytes(self.model.target, weights, self.backend)

    def needed(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> int:
        """Return the bytes of buffers, a copy to draft with, tables and the largest workspace."""
        plan = self._planner.plan(strategy, sampling, batch=batch, shape=shape)
        copy = self.copy_bytes(strategy)
        return copy + plan.buffers + plan.tables + max(plan.workspace.values())

    def _bound(self, batch: int, strategy: Strategy, sampling: Sampling) -> int:
        t: Any = self.model.manifest.target
        rows = batch * sampling.branches
        nodes = strategy.drafts.size[0]
        slots = t.prefix_length + t.num_tokens + 2 * nodes
        cache = 2 * (t.n_layer + 1) * rows * slots * t.dim * self.dtype.itemsize
        logits = 4 * rows * nodes * t.vocab_size
        prompt = 32 * 4 * rows * t.prefix_length * t.dim
        table = 4 * t.vocab_size * (strategy.neighbours + 1)
        copy = self.copy_bytes(strategy)
        noise = min(4 * batch * t.num_tokens * t.vocab_size, self.backend.preferences.noise_bytes)
        return int(2 * cache + 32 * logits + prompt + table + copy + 4 * noise + ROUGH_REST)

    def keeps_text(self, images: int) -> bool:
        """Return whether a text encoder may stay where it was just used: so many images fit beside it.

        By the rough bound alone, drafts included. Not where the device does not say what it has left:
        reading an encoder again costs seconds, running out of memory the request.
        """
        free = self.backend.memory().left
        manifest = self.model.manifest
        widest = "lantern++" if manifest.drafter is not None else "auto"
        strategy = self._planner.strategy(widest)
        bound = self._bound(max(images, 1), strategy, manifest.defaults.sampling)
        return free is not None and bound < free

    def fit(
        self,
        batch: int,
        strategy: Strategy,
        sampling: Sampling,
        *,
        shape: Hashable = None,
        spare: int = 0,
    ) -> Fit:
        """Return how many of ``batch`` images fit what the device has left, workspace included.

        Where a bound far above the truth fits, nothing is counted: tracing without data makes torch
        load 60 MB of itself. ``shape``: of the picture; None: the usual one. ``spare``: bytes that are
        held now and can be given up.
        """
        free = self.backend.memory().left
        bound = self._bound(batch, strategy, sampling)
        if free is None or bound < free + spare:
            return Fit(batch, batch, bound, free)

        def needed(images: int) -> int:
            return self.needed(images, strategy, sampling, shape)

        return Fit(batch, most_images(needed, free + spare, batch), needed(batch), free)
