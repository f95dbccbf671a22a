"""Keeps captured engines, one per bucket of shapes, and releases the least recently used."""

from __future__ import annotations

import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.engines import engine_for
from lantern_accel.decoding.geometry import check as check_settings
from lantern_accel.decoding.neighbours import cached_neighbour_table
from lantern_accel.device.backend import Backend, recorded
from lantern_accel.device.capture import Replay
from lantern_accel.device.entry_points import why
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DoesNotFitError,
    LanternError,
    LanternWarning,
    NotCapturableError,
    NotFiniteError,
)
from lantern_accel.families.base import Model, Rows
from lantern_accel.files import cache_dir
from lantern_accel.memory.limits import Capacity
from lantern_accel.memory.plan import size as written
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.sources import fault_of
from lantern_accel.strategy.values import AUTO, NeighbourSpace, Sampling, SelfDrafts, Strategy

#: Engines (buffers of one bucket) that are kept for reuse.
KEPT_ENGINES = 4


@dataclass(frozen=True)
class CapturedEngine:
    """An engine with its captured prefill and step.

    ``steps``: what a request runs, by how many slots of the cache a step looks at. ``step`` looks at all
    slots, and answers for all of these.
    """

    engine: EngineBase
    prefill: Replay
    step: Replay
    steps: Mapping[int, Callable[[], None]]

    def begin(self, rows: Rows, seed: int | Sequence[int], images: Sequence[int]) -> None:
        """Run the prompts of a batch, ``rows``; ``seed`` and ``images`` pick each image's randomness."""
        uniforms = self.engine.randomness(seed, list(images))
        self.engine.start(rows.condition, rows.mask, uniforms, self.prefill)

    def release(self) -> None:
        """Free what the captured functions hold."""
        self.prefill.release()
        self.step.release()


class Moving(Replay):
    """A step that is one of several captured ones, as the engine says."""

    def __init__(self, step: Callable[[], None], parts: Sequence[Replay]) -> None:
        super().__init__(step)
        self.parts: list[Replay] = []
        self.add(parts)

    def add(self, parts: Sequence[Replay]) -> None:
        """Count further ones in, which may come later."""
        self.parts += parts
        self.captured = all(one.captured for one in self.parts)
        self.nbytes = sum(one.nbytes for one in self.parts)
        self.seconds = sum(one.seconds for one in self.parts)

    def expect(self, calls: int) -> None:
        for one in self.parts:
            one.expect(calls // len(self.parts))

    def release(self) -> None:
        super().release()
        for one in self.parts:
            one.release()


class Bucketed(Moving):
    """A step captured for each bucket of the cache: a call looks at the whole, which comes last."""

    def __init__(self, parts: Sequence[Replay]) -> None:
        super().__init__(parts[-1], parts)
        self.kind = parts[-1].kind

    def timed(self) -> dict[str, float] | None:
        return self.parts[-1].timed()

    def tracing(self) -> float | None:
        spent = [one.tracing() for one in self.parts]
        return max((seconds for seconds in spent if seconds is not None), default=None)


def bucket(images: int) -> int:
    """Return the batch that serves so many images: 1, 2, 4, 8, ..."""
    return 1 << (images - 1).bit_length()


class Engines:
    """Makes engines for one model on one device and keeps some; closes none by itself."""

    def __init__(self, model: Model, backend: Backend, capacity: Capacity) -> None:
        self.model, self.backend, self.capacity = model, backend, capacity
        self.kept = KEPT_ENGINES
        self.warmed: list[str] = []
        #: Seconds that may still go into captures which the present request could do without; below 0
        #: it has waited enough.
        self.patience = math.inf
        #: Functions that could not be captured: the name, the seconds of a call, and why.
        self._uncaptured: list[tuple[str, float, str]] = []
        self._warned = False
        self._ready: OrderedDict[Hashable, CapturedEngine] = OrderedDict()
        #: Targets with weights in fewer bits, to draft with, by those weights' name.
        self._copies: dict[str, Any] = {}
        self._neighbours: dict[tuple[int, str], Tensor] = {}

    @property
    def ready(self) -> list[CapturedEngine]:
        """The engines that are kept, the one used last at the end."""
        return list(self._ready.values())

    def keep(self, count: int) -> None:
        """Keep so many engines for reuse, or more."""
        self.kept = max(self.kept, count)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept."""
        return sum(one.engine.nbytes for one in self._ready.values())

    def release(self) -> None:
        """Free the buffers and captured functions that are kept."""
        for one in self._ready.values():
            one.release()
        self._ready.clear()

    def padded(self, images: int, strategy: Strategy, sampling: Sampling) -> int:
        """Return the batch to decode ``images`` with: the next bucket where captured steps are reused.

        Rows that are not asked for are finished from the start. A device that runs steps eagerly has
        nothing to reuse, and a bucket that does not fit is not taken.
        """
        larger = bucket(images)
        if larger == images or not self.backend.support("capture"):
            return images
        found = self.capacity.fit(larger, strategy, sampling, spare=self.nbytes)
        return larger if found.batch == larger else images

    def neighbours(self, k: int, space: NeighbourSpace | None = None) -> Tensor:
        """Return the neighbour table of the codebook, int32 ``[V, k]``, from the disk cache or new.

        ``space``: where distance is measured; None: as the model says.
        """
        space = space or self.model.manifest.neighbour_space
        if (k, space) not in self._neighbours:
            rows, on_sphere = self.model.family.codebook(self.model)
            import torch

            table = cached_neighbour_table(
                rows, k, normalise=on_sphere and space == "decoder", cache=cache_dir()
            )
            # A code that stands for no patch, such as the end of a row, is near nothing: whatever its row
            # says has no mass where that code may be.
            more = self.model.manifest.target.vocab_size - len(table)
            table = torch.cat((table, table[:more] * 0)) if more else table
            self._neighbours[k, space] = table.to(self.backend.device)
        return self._neighbours[k, space]

    def check(self, strategy: Strategy, sampling: Sampling) -> None:
        """Raise StrategyError for what the model, its drafter and its tree cannot do; keeps nothing."""
        if strategy.name == AUTO:
            return
        model, k = self.model, strategy.neighbours
        check_settings(strategy, sampling, model.manifest.target.vocab_size)
        # Before the engine: it cannot be wider than the codebook.
        table = self.neighbours(k) if k else None
        parts = model.target, model.drafter, self.backend
        with self.backend.inference():  # the target stands for a copy of its sizes
            engine_for(*parts, strategy, sampling, neighbours=table, copy=model.target)

    def get(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> CapturedEngine:
        """Return the engine of these settings with its captured functions, made on first use.

        Settings that are data, such as temperatures and bounds, share an engine.
        """
        key = (batch, strategy.bucket, sampling.bucket, shape)
        with explained(self.backend):
            if key in self._ready:
                self._more(self._ready[key])
            else:
                self._ready[key] = self._made(batch, strategy, sampling, shape)
        self._tell()
        self._ready.move_to_end(key)
        self._ready[key].engine.configure(strategy, sampling)
        return self._ready[key]

    def _made(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable
    ) -> CapturedEngine:
        """Make an engine where there is room for it, and capture its functions."""
        if self.warmed:
            warnings.warn(
                f"this bucket ({strategy.name} x {batch}, or its sampling) was not warmed up and is "
                f"compiled now; warm are: {', '.join(self.warmed)}",
                LanternWarning,
                stacklevel=3,
            )
        check_settings(strategy, sampling, self.model.manifest.target.vocab_size)
        parts = *self.model.family.target_for_shape(self.model, shape), self.backend
        copy, k = self.copy(strategy, shape), strategy.neighbours
        self._make_room(batch, strategy, sampling, shape)
        table = self.neighbours(k, strategy.neighbour_space) if k else None
        engine = engine_for(*parts, strategy, sampling, batch=batch, neighbours=table, copy=copy)
        return CapturedEngine(
            engine, self._capture(engine.prefill, "prefill"), *self._steps(engine)
        )

    def copy(self, strategy: Strategy, shape: Hashable = None) -> Any:
        """Return the target with the weights that a strategy drafts with, made once; None: with none.

        Raises :class:`DoesNotFitError` where the device has no memory left for them.
        """
        if not isinstance(strategy.drafts, SelfDrafts):
            return None
        how, model = rounding(strategy.drafts.weights), self.model
        if how.name not in self._copies:
            need, free = self.capacity.copy_bytes(strategy), self.backend.memory().left
            if free is not None and need > free:
                raise DoesNotFitError(
                    f"a copy of {model.manifest.name} in {how.name} to draft with takes {written(need)}, "
                    f"device {self.backend.device} has {written(free)} free; draft with fewer bits "
                    "(--tree self:4,int4), or choose a strategy without a copy, such as 'scd'"
                )
            self._copies[how.name] = rounded_copy(model.target, self.backend, how, drafts=True)
            self.capacity.copies = frozenset(self._copies)
        drawn = replace(model, target=self._copies[how.name])
        return model.family.target_for_shape(drawn, shape)[0]

    def keep_copies(self, names: frozenset[str]) -> None:
        """Free copies in other weights, and the engines that draft with them."""
        for key, one in list(self._ready.items()):
            tree = one.engine.strategy.drafts
            if isinstance(tree, SelfDrafts) and tree.weights not in names:
                self._ready.pop(key).release()
        self._copies = {name: one for name, one in self._copies.items() if name in names}
        self.capacity.copies = frozenset(self._copies)

    def holds(self, strategy: Strategy) -> bool:
        """Return whether the copy that a strategy drafts with is there, or fits; True: it needs none."""
        need = self.capacity.copy_bytes(strategy)
        free = self.backend.memory().left if need else None
        return free is None or need <= free

    def fits(self, strategy: Strategy, batch: int, sampling: Sampling) -> bool:
        """Return whether the buffers of a strategy fit in place of those that are kept."""
        return self.capacity.fit(batch, strategy, sampling, spare=self.nbytes).batch == batch

    def _tell(self) -> None:
        """Warn of functions that run as they are, once."""
        left, self._uncaptured = self._uncaptured, []
        if left and not self._warned:
            self._warned = True
            # A step of several lengths is one thing to the reader, and its longest one tells most.
            kinds = {name.partition(" ")[0]: seconds for name, seconds, _ in reversed(left)}
            kinds = {name: kinds[name] for name in ("prefill", "step") if name in kinds} or kinds
            names, verb = " and the ".join(kinds), "run" + "s" * (len(kinds) < 2)
            cost = " and ".join(f"{1000 * seconds:.1f} ms" for seconds in kinds.values())
            warnings.warn(
                f"the {names} cannot be captured on {self.backend.device} and {verb} operator by "
                f"operator, which takes {'longer' if self.backend.simulated else cost + ' per call'} "
                f"({left[-1][2]})",
                LanternWarning,
                stacklevel=3,
            )

    def _steps(self, engine: EngineBase) -> tuple[Replay, Mapping[int, Callable[[], None]]]:
        """Capture an engine's step for every bucket, or each of the functions that it moves between.

        Before the image: a request does not stop in the middle of one to make a graph.
        """
        if not isinstance(engine, AdaptiveEngine):
            whole, found = engine.sizes[-1], engine.steps
            steps = {
                slots: self._capture(one, "step" if slots == whole else f"step {slots}")
                for slots, one in found.items()
            }
            replays = list(steps.values())
            return (replays[0] if len(replays) == 1 else Bucketed(replays)), steps
        step = Moving(engine.step, [])
        self._lengths(engine, step)
        return step, engine.steps

    def _lengths(self, engine: AdaptiveEngine, step: Moving) -> None:
        """Capture one more length at least, plain decoding first; further ones as patience allows.

        The longest of them first: where bytes are what a step costs, it promises most.
        """
        took = 0.0
        order = sorted(engine.lengths, key=lambda length: (length > 1, -length))
        for length in order:
            done = engine.usable or frozenset[int]()
            if length in done:
                continue
            if took > self.patience:
                self.patience = -1.0
                return
            began = time.perf_counter()
            for name, one in engine.functions_of(length).items():
                engine.functions[name] = part = self._capture(one, name)
                step.add([part])
            took = time.perf_counter() - began
            if done:  # an image needs one
                self.patience -= took
            engine.usable = done | {length}
        engine.usable = None

    def _more(self, ready: CapturedEngine) -> None:
        """Capture what an earlier request did not wait for."""
        engine, step = ready.engine, ready.step
        if isinstance(engine, AdaptiveEngine) and engine.usable is not None and self.patience >= 0:
            assert isinstance(step, Moving)
            self._lengths(engine, step)

    def _capture(self, function: Callable[[], None], name: str) -> Replay:
        """Capture a function; one that the device cannot capture, and was not told to, stays as it is.

        Any other failure is the device's own, and raised.
        """
        try:
            return recorded(self.backend, function, name)
        except NotCapturableError as error:
            if self.backend.capture_asked:
                raise
            with self.backend.stopwatch() as watch:
                function()
            self._uncaptured.append((name, watch.seconds, " ".join(str(error).split())))
            return Replay(function)
        except Exception as error:
            known = error if isinstance(error, BackendError) else self.backend.explain(error)
            if known is not None:
                raise known from error
            raise BackendError(
                f"capturing the {name} failed on {self.backend.device} ({why(error)}); use another "
                "device (`lantern-accel devices` lists them), or run "
                f"`lantern-accel conform {self.backend.name}` to see what fails"
            ) from error

    def _make_room(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable
    ) -> None:
        """Release kept engines, the oldest first, until a new one fits; raise where none does."""
        text = self.model.text
        while True:
            found = self.capacity.fit(batch, strategy, sampling, shape=shape)
            if found.batch < batch and text is not None:
                # An encoder that stayed goes first: it is only read again.
                text.release()
                text = None
                continue
            if not self._ready:
                found.check(self.backend)
            if found.batch == batch and len(self._ready) < self.kept:
                return
            self._ready.popitem(last=False)[1].release()

    def usual_batch(self, images: int, strategy: Strategy, sampling: Sampling) -> int:
        """Return how many images to decode together where a request does not say."""
        usual = min(self.backend.default_batch, images)
        drafts = strategy.needs_drafter
        if usual == 1 or (drafts and self.model.drafter is None):
            return usual
        return max(1, self.capacity.fit(usual, strategy, sampling, spare=self.nbytes).batch)

    def expect(
        self, size: int, times: int, strategy: Strategy, sampling: Sampling, shape: Hashable
    ) -> None:
        """Announce to the captured functions how many batches of a size are coming."""
        self.patience = self.backend.capture_patience
        ready = self.get(size, strategy, sampling, shape)
        ready.prefill.expect(times)
        # Half as many steps as tokens: about what speculation leaves.
        drafts = ready.engine.geometry.depth > 0
        ready.step.expect(times * ready.engine.geometry.tokens // (2 if drafts else 1))


@contextmanager
def explained(
    backend: Backend, finish: Callable[[DeviceLostError], None] = lambda lost: None
) -> Iterator[None]:
    """Let errors of the device say what they mean; ``finish`` gives a lost device's images."""
    try:
        yield
    except Exception as error:
        known: Exception | None = None
        if isinstance(error, BackendError) or not isinstance(error, LanternError):
            known = fault_of(error)
        if known is not None:
            raise known from error
        known = error
        if not isinstance(error, LanternError):
            known = backend.explain(error)
        if isinstance(known, DeviceLostError):
            finish(known)
        if known is None or known is error:
            raise
        raise known from error


@contextmanager
def of_image(chunk: Sequence[int]) -> Iterator[None]:
    """Let an error about a row of a batch name the request's image, counted from 0."""
    try:
        yield
    except NotFiniteError as error:
        row = min(error.row, len(chunk) - 1)
        raise NotFiniteError(row, error.step, error.dtype, chunk[row]) from None
