"""Keeps captured engines, one per bucket of shapes, and releases the least recently used."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import SERVED
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.target import Target
from lantern_accel.device.backend import Backend, record_replay
from lantern_accel.device.capture import Replay
from lantern_accel.device.context import inference
from lantern_accel.device.entry_points import why
from lantern_accel.device.waiting import waiting
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DoesNotFitError,
    LanternError,
    LanternWarning,
    NotCapturableError,
    StrategyError,
)
from lantern_accel.families.base import Model, Rows
from lantern_accel.files import cache_dir
from lantern_accel.memory.limits import Capacity, shortage
from lantern_accel.nn.neighbours import cached_neighbour_table
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.sources import SOURCES
from lantern_accel.strategy.strategy import check_settings
from lantern_accel.strategy.values import AUTO, NeighbourSpace, Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image

_LOG = logging.getLogger("lantern_accel.generation")
#: Engines (buffers of one bucket) that are kept for reuse.
MOST_ENGINES = 4


@dataclass(frozen=True)
class CapturedEngine:
    """An engine whose functions are captured."""

    engine: Engine

    @property
    def replays(self) -> list[Replay]:
        """The captured steps."""
        named = self.engine.functions.items()
        return [one for name, one in named if "step" in name and isinstance(one, Replay)]

    @property
    def prefill(self) -> Replay:
        found = self.engine.functions["prefill"]
        assert isinstance(found, Replay)
        return found

    def begin(self, rows: Rows, seed: int | Sequence[int], images: Sequence[int]) -> None:
        """Run the prompts of a batch, ``rows``; ``seed`` and ``images`` pick each image's randomness."""
        self.engine.start(rows.condition, rows.mask, self.engine.randomness(seed, list(images)))

    def expect(self, batches: int) -> None:
        """Announce a number of batches, before the first begins."""
        self.prefill.expect(batches)
        # Half as many steps as tokens: about what speculation leaves.
        g, replays = self.engine.geometry, self.replays
        for one in replays:
            one.expect(batches * g.tokens // (2 if g.depth else 1) // len(replays))

    def release(self) -> None:
        """Free what the captured functions hold."""
        for one in self.engine.functions.values():
            if isinstance(one, Replay):
                one.release()


class Engines:
    """Makes engines for one model on one device and keeps some; closes none by itself."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model, self.backend, self.dtype = model, backend, dtype
        self.capacity = Capacity(model, backend, dtype, lambda: self.nbytes)
        self.kept = MOST_ENGINES
        self.warmed: list[str] = []
        #: Functions that could not be captured: the name, the seconds of a call, and why.
        self._uncaptured: list[tuple[str, float, str]] = []
        self._warned = False
        self._ready: OrderedDict[Hashable, CapturedEngine] = OrderedDict()
        #: Targets with quantized weights, to draft with, by those weights' name.
        self._copies: dict[str, object] = {}
        self._neighbours: dict[tuple[int, str], Tensor] = {}

    @property
    def ready(self) -> list[CapturedEngine]:
        """The engines that are kept, the one used last at the end."""
        return list(self._ready.values())

    def keep(self, count: int) -> None:
        """Keep this many engines for reuse, or more."""
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

    def neighbours(self, k: int, space: NeighbourSpace | None = None) -> Tensor:
        """Return the neighbour table of the codebook, int32 ``[V, k]``, from the disk cache or new.

        ``space``: where distance is measured; None: as the model says.
        """
        space = space or self.model.manifest.neighbour_space
        if (k, space) not in self._neighbours:
            rows, on_sphere = self.model.family.codebook(self.model)
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
        model, k = self.model, strategy.neighbours
        check_settings(strategy, sampling, model.manifest.target.vocab_size)
        if strategy.name == AUTO:
            return
        # Before the engine: it cannot be wider than the codebook.
        table = self.neighbours(k) if k else None
        target, drafter, backend = model.target, model.drafter, self.backend
        with inference(backend):  # the target stands for a copy of its sizes
            Engine(target, drafter, backend, strategy, sampling, neighbours=table, copy=target)

    def get(
        self,
        batch: int,
        strategy: Strategy,
        sampling: Sampling,
        shape: Hashable = None,
        steps: bool = True,
    ) -> CapturedEngine:
        """Return the engine of these settings with its captured functions, made on first use.

        Settings that are data, such as temperatures, share an engine. ``steps``: False captures its
        prefill alone, a later call the rest. Raises :class:`DoesNotFitError`.
        """
        key = (batch, strategy.bucket, sampling.bucket, shape)
        with explain_errors(self.backend):
            ready = self._ready.get(key) or self._make(batch, strategy, sampling, shape)
            self._capture_all(ready.engine, steps)
            self._ready[key] = ready
        self._warn_of_uncaptured()
        self._ready.move_to_end(key)
        ready.engine.configure(strategy, sampling)
        return ready

    def _make(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable
    ) -> CapturedEngine:
        """Make an engine where it fits the memory."""
        if self.warmed:
            warnings.warn(
                f"this bucket ({strategy.name} x {batch}, or its sampling) was not warmed up and is "
                f"compiled now; warm are: {', '.join(self.warmed)}",
                LanternWarning,
                stacklevel=3,
            )
        check_settings(strategy, sampling, self.model.manifest.target.vocab_size)
        target, drafter = self.model.family.target_for_shape(self.model, shape)
        copy, k = self.copy(strategy, shape), strategy.neighbours
        self._release_until_it_fits(batch, strategy, sampling, shape)
        table = self.neighbours(k, strategy.neighbour_space) if k else None
        return CapturedEngine(
            Engine(
                target, drafter, self.backend, strategy, sampling,
                batch=batch, neighbours=table, copy=copy,
            )
        )  # fmt: skip

    def copy(self, strategy: Strategy, shape: Hashable = None) -> Target | None:
        """Return the target with the weights that a strategy drafts with, made once; None: with none.

        Raises :class:`DoesNotFitError` where the device has no memory left for them.
        """
        weights, model = strategy.drafts.copy_weights, self.model
        if weights is None:
            return None
        how = rounding(weights)
        if how.name not in self._copies:
            need, free = self.capacity.copy_bytes(strategy), self.backend.memory().left
            if free is not None and need > free:
                way = (
                    "draft with fewer bits (--strategy self:drafts=self:4,int4), or choose a strategy "
                    "without a copy, such as 'scd'"
                )
                what = f"a copy of {model.manifest.name} in {how.name} to draft with"
                raise DoesNotFitError(shortage(self.backend, what, need, way))
            self._copies[how.name] = rounded_copy(model.target, self.backend, how, drafts=True)
            self.capacity.copies = frozenset(self._copies)
        copied = replace(model, target=self._copies[how.name])
        made: Target = model.family.target_for_shape(copied, shape)[0]
        return made

    def keep_copies(self, names: frozenset[str]) -> None:
        """Free copies in other weights, and the engines that draft with them."""
        for key, one in list(self._ready.items()):
            if copies_of(one.engine.strategy) - names:
                self._ready.pop(key).release()
        self._copies = {name: one for name, one in self._copies.items() if name in names}
        self.capacity.copies = frozenset(self._copies)

    def _warn_of_uncaptured(self) -> None:
        """Warn of functions that run as they are, once."""
        left, self._uncaptured = self._uncaptured, []
        if left and not self._warned:
            self._warned = True
            names = ", ".join(name for name, _, _ in left)
            ms = "" if self.backend.simulated else f" ({1000 * left[-1][1]:.1f} ms a call)"
            warnings.warn(
                f"{names} cannot be captured on {self.backend.device}: operator by operator it takes "
                f"longer{ms}; {left[-1][2]}",
                LanternWarning,
                stacklevel=3,
            )

    def _capture_all(self, engine: Engine, steps: bool) -> None:
        """Capture what is not: prefill and, if asked for, all steps; tell of graphs that compile long."""
        raw = [name for name, one in engine.functions.items() if not isinstance(one, Replay)]
        left = [name for name in raw if steps or name == "prefill"]
        graphs = [name for name in left if not name.startswith("widen")]
        long = graphs and self.backend.preferences.compiles and self.backend.support("capture")
        text, began = f"compiling {len(graphs)} graphs, once", time.monotonic()
        with waiting(text, _LOG) if long else nullcontext():
            for name in left:
                engine.functions[name] = self._capture(engine.functions[name], name)
                if long:
                    _LOG.info("%s: %s after %.1f s", text, name, time.monotonic() - began)

    def _capture(self, function: Callable[[], None], name: str) -> Replay:
        """Capture a function; one that the device cannot capture stays as it is, unless asked for."""
        try:
            return record_replay(self.backend, function, name)
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

    def _release_until_it_fits(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable
    ) -> None:
        """Release kept engines, the oldest first, until a new one fits; raise where none does."""
        text, need = self.model.text, self.capacity.bytes_of(batch, strategy, sampling, shape, 0)
        while True:
            free = self.backend.memory().left
            fits = free is None or need <= free
            if fits and len(self._ready) < self.kept:
                return
            if not fits and text is not None:
                # An encoder that stayed goes first: it is only read again.
                text.release()
                text = None
            elif self._ready:
                self._ready.popitem(last=False)[1].release()
            else:
                return self.capacity.check(batch, strategy, sampling, shape)


def copies_of(strategy: Strategy) -> frozenset[str]:
    """Return the weights of the copies that a strategy drafts with: one, or none."""
    weights = strategy.drafts.copy_weights
    return frozenset(() if weights is None else {weights})


def fault_of(error: BaseException) -> StrategyError | None:
    """Return what to say of an error from the code of a package that has a source; None: from ours."""
    made = {SERVED[one].__module__: kind for kind, one in SOURCES.items() if one in SERVED}
    modules = {one.__module__: kind for kind, one in SOURCES.items()} | made
    ours = ("__main__", __name__.partition(".")[0])
    brought = {name: one for name, one in modules.items() if name.partition(".")[0] not in ours}
    place: str | None = None
    seen: BaseException | None = error
    while brought and seen is not None:
        for frame, line in traceback.walk_tb(seen.__traceback__):
            kind = brought.get(str(frame.f_globals.get("__name__", "")))
            if kind is not None:
                text = " ".join(str(seen).split())
                where = f"{frame.f_code.co_filename}, line {line}"
                place = f"{kind!r} failed in {where} ({type(seen).__name__}: {text})"
        seen = seen.__cause__
    if place is None:
        return None
    return StrategyError(f"the source of drafts {place}; mend it there, or draft with another")


@contextmanager
def explain_errors(backend: Backend, images: list[Image] | None = None) -> Iterator[None]:
    """Let errors of the device say what they mean; ``images``: what a lost one had finished."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, LanternError)
        known: Exception | None = None
        if not ours or isinstance(error, BackendError):
            known = fault_of(error)
        if known is None:
            known = error if ours else backend.explain(error)
        if isinstance(known, DeviceLostError) and images is not None:
            known.images = images
        if known is None or known is error:
            raise
        raise known from error
