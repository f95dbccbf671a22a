"""Plans the memory of weights and of batches on a device, and says what would fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from lantern_accel.device.backend import DTYPES, Backend
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
    what = f"the model {found.manifest.name} in {str(dtype).removeprefix('torch.')}"
    raise DeviceMemoryError(
        shortage(backend, what, need, f"{way}, or end other programs that use it")
    )


def shortage(backend: Backend, what: str, need: int, way: str) -> str:
    """Say that ``what`` takes more bytes than a device has free, and the ``way`` out."""
    use = backend.memory()
    total = "" if use.limit is None else f" of {format_bytes(use.limit)}"
    return (
        f"{what} takes {format_bytes(need)}, device {backend.device} has {format_bytes(use.left or 0)} "
        f"free{total}; {way}"
    )


# --- buffers ------------------------------------------------------------------------------------


def bucket(images: int) -> int:
    """Return the batch that serves as many images: 1, 2, 4, 8, ..."""
    return 1 << (images - 1).bit_length()


class Capacity:
    """Plans the memory of requests for one loaded model on one device, before any engine is made.

    ``spare``: bytes of engines that are held now and can be given up. ``copies``: weights of the copies
    to draft with that are held already. ``shape``: of an image; None: the usual one.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        dtype: torch.dtype,
        spare: Callable[[], int] = lambda: 0,
    ) -> None:
        self.model, self.backend, self.dtype, self.spare = model, backend, dtype, spare
        self.copies: frozenset[str] = frozenset()
        self._planner = Planner(model.manifest, dtype=dtype, runtime=0, ops=backend)

    @property
    def free(self) -> int | None:
        """What the device has left; None where it does not say."""
        return self.backend.memory().left

    def copy_bytes(self, strategy: Strategy) -> int:
        """Return the bytes of the copy that a strategy drafts with, 0 where it is held or none."""
        weights = strategy.drafts.copy_weights
        if weights is None or weights in self.copies:
            return 0
        return copy_bytes(self.model.target, weights, self.backend)

    def holds(self, strategy: Strategy) -> bool:
        """Return whether the copy that a strategy drafts with is there, or fits; True: it needs none."""
        need = self.copy_bytes(strategy)
        return not need or (free := self.free) is None or need <= free

    def count_bytes(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> int:
        """Count the bytes of buffers, a copy to draft with, tables and the largest workspace."""
        plan = self._planner.plan(strategy, sampling, batch=batch, shape=shape)
        copy = self.copy_bytes(strategy)
        return copy + plan.buffers + plan.tables + max(plan.workspace.values())

    def _bound_bytes(self, batch: int, strategy: Strategy, sampling: Sampling) -> int:
        t = self.model.manifest.target
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

    def bytes_of(
        self,
        batch: int,
        strategy: Strategy,
        sampling: Sampling,
        shape: Hashable = None,
        spare: int | None = None,
    ) -> int:
        """Return what a batch needs: a bound far above the truth where that fits, else a count.

        Counting makes torch load 60 MB of itself. ``spare``: bytes that can be given up; None: all.
        """
        spare = self.spare() if spare is None else spare
        free, bound = self.free, self._bound_bytes(batch, strategy, sampling)
        if free is None or bound < free + spare:
            return bound
        return self.count_bytes(batch, strategy, sampling, shape)

    def largest(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> int:
        """Return how many of ``batch`` images fit in place of the engines that are held; may be 0."""
        more = strategy, sampling, shape
        if self.fits(batch, *more):
            return batch
        free = (self.free or 0) + self.spare()
        return most_images(lambda n: self.count_bytes(n, *more), free, batch)

    def fits(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> bool:
        """Return whether a batch fits in place of the engines that are held."""
        more, free = (strategy, sampling, shape), self.free
        return free is None or self.bytes_of(batch, *more) <= free + self.spare()

    def check(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> None:
        """Raise :class:`DoesNotFitError` where a batch does not fit, with the one that does."""
        if (most := self.largest(batch, strategy, sampling, shape)) < batch:
            need = self.count_bytes(batch, strategy, sampling, shape)
            way = f"a batch of {most} fits" if most else "not even one fits; use a smaller model"
            raise DoesNotFitError(shortage(self.backend, f"a batch of {batch}", need, way))

    def batches(
        self,
        images: int,
        asked: int | None,
        strategy: Strategy,
        sampling: Sampling,
        shape: Hashable = None,
    ) -> dict[int, int]:
        """Divide images into batches of one size, and the rest: the rows of each.

        ``asked``: how many are decoded together; None: as many as the device likes and as fit. Where
        captured steps are reused, a batch has the rows of the next bucket, if that fits; rows that are
        not asked for are finished from the start.
        """
        batch = min(asked or self.backend.preferences.default_batch, images)
        absent = strategy.needs_drafter and self.model.drafter is None  # which is refused later
        if asked is None and batch > 1 and not absent:
            batch = max(1, self.largest(batch, strategy, sampling, shape))
        found = {batch: batch, images % batch or batch: images % batch or batch}
        for count in found if self.backend.support("capture") else ():
            rows = bucket(count)
            if rows == count or self.fits(rows, strategy, sampling, shape):
                found[count] = rows
        return found

    def keeps_text(self, images: int) -> bool:
        """Return whether a text encoder may stay where it was just used: the images fit next to it.

        By the rough bound alone, drafts included. Not where the device does not say what it has left:
        reading an encoder again costs seconds, running out of memory the request.
        """
        manifest = self.model.manifest
        widest = "lantern++" if manifest.drafter is not None else "auto"
        strategy = self._planner.strategy(widest)
        bound = self._bound_bytes(max(images, 1), strategy, manifest.defaults.sampling)
        return (free := self.free) is not None and bound < free
