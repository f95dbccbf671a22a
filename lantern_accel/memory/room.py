"""How many images of a loaded model fit what its device has left, workspace included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.families.base import Model
from lantern_accel.memory.footprint import nodes_of
from lantern_accel.memory.limits import engine_bytes, free_bytes
from lantern_accel.memory.plan import Planner
from lantern_accel.strategy.values import Sampling, Strategy

#: Taken for pixels and everything else where only a rough bound is wanted.
ROUGH_REST = 2 * 10**9


class Room:
    """Answers for one loaded model on one device."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model, self.backend, self.dtype = model, backend, dtype
        self._planner = Planner(model.manifest, dtype=dtype, runtime=0)

    def plenty(self, batch: int, strategy: Strategy, sampling: Sampling) -> bool:
        """Return whether a bound far above the truth fits, or the device does not say what it has left.

        Then nothing need be counted: tracing without data makes torch load 60 MB of itself.
        """
        free = free_bytes(self.backend.memory())
        return free is None or self._bound(batch, strategy, sampling) < free

    def beside(self, strategy: Strategy, sampling: Sampling) -> Callable[[int], int]:
        """Return a function of the batch: neighbour table and the largest phase's workspace, in bytes."""

        def beside(batch: int) -> int:
            plan = self._planner.plan(strategy, sampling, batch=batch)
            return plan.tables + max(plan.workspace.values())

        return beside

    def _bound(self, batch: int, strategy: Strategy, sampling: Sampling) -> int:
        t: Any = self.model.manifest.target
        rows = batch * sampling.branches
        nodes = nodes_of(strategy)
        slots = t.prefix_length + t.num_tokens + 2 * nodes
        cache = 2 * (t.n_layer + 1) * rows * slots * t.dim * self.dtype.itemsize
        logits = 4 * rows * nodes * t.vocab_size
        prompt = 32 * 4 * rows * t.prefix_length * t.dim
        table = 4 * t.vocab_size * (strategy.neighbours + 1)
        return int(2 * cache + 32 * logits + prompt + table + ROUGH_REST)

    def fitting(self, batch: int, strategy: Strategy, sampling: Sampling, spare: int = 0) -> int:
        """Return the most images, ``batch`` at most, that fit what the device has left; may be 0.

        ``spare``: bytes that are held now and can be given up.
        """
        free = free_bytes(self.backend.memory())
        if free is None or self._bound(batch, strategy, sampling) < free + spare:
            return batch
        beside = self.beside(strategy, sampling)
        parts = self.model.target, self.model.drafter

        def fits(images: int) -> bool:
            buffers = engine_bytes(self.backend, *parts, strategy, sampling, images)
            return buffers + beside(images) <= free + spare

        if fits(batch):
            return batch
        low, high = 0, batch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
