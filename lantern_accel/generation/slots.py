"""Rows of one engine that images join and leave while it steps: continuous batching in fixed slots.

A row whose image is complete takes the next one: its prompt is run by an engine of one image, and what
that leaves (keys and values of the prompt, condition, counters) is copied into the row. Nothing is
captured or compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lantern_accel.decoding.course import Course, SyncSchedule
from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.context import inference, inferring
from lantern_accel.errors import DoesNotFitError, NotFiniteError
from lantern_accel.families.base import Conditions, Rows, Size
from lantern_accel.generation.decide import decide
from lantern_accel.generation.engines import CapturedEngine, explained
from lantern_accel.generation.runtime import Runtime
from lantern_accel.records import format_bytes
from lantern_accel.strategy.values import Sampling, Strategy

#: What stands for an image with those who generate it.
T = TypeVar("T")
#: What all rows share and a row that joins leaves alone.
SHARED = ("step",)


@dataclass
class _Row:
    """An image in a row: drafts that its steps have tried, and passes before one whose numbers failed."""

    drafts: int = 0
    failed: int | None = None


@dataclass(frozen=True)
class Drawn:
    """A complete image: its tokens and counters (one row), and the drafts that its steps have tried."""

    decoded: Decoded
    drafts: int


class Slots(Generic[T]):
    """``size`` rows of one engine for images of one strategy, one set of sampling settings and one shape.

    The engines are used by one thread; who makes slots must not call ``generate`` while they are in use.
    """

    def __init__(
        self,
        runtime: Runtime,
        asked: Strategy,
        sampling: Sampling,
        first: Conditions,
        images: int,
        batch: int | None,
        pixels: Size | None = None,
    ) -> None:
        """Decide what ``images`` are decoded with, ``batch`` at once, and make their rows.

        ``first``: of the first image, whose shape all have; ``pixels``: width and height that were asked
        for. Raises :class:`DoesNotFitError` where the engine and that of one image do not fit together.
        """
        self.engines, self.backend, self.shape = runtime.engines, runtime.backend, first.shape
        of = runtime, asked, sampling, first.shape

        def rows(count: int) -> Rows:
            return runtime.rows(first.pick([0] * count), sampling)

        self.decision = decide(*of, rows, images, batch, pixels, joins=True)
        self.size = size = self.decision.parts[0].rows
        #: The engine's buffers, the length of its next step and its rows, while others use it.
        self._aside: tuple[dict[str, Tensor], int, Course] | None = None
        self.ready = self._both()
        self._rows: dict[int, _Row] = {}
        #: What each row generates, by row.
        self.images: dict[int, T] = {}
        engine = self.engine
        one, branches = torch.tensor([0]), torch.arange(engine.geometry.branches) * size
        #: Where a row's entries are in buffers of images, and in buffers of rows.
        self._places = {
            row: {len(part): (part + row).to(self.backend.device) for part in (one, branches)}
            for row in range(size)
        }
        with inference(self.backend):  # every row is finished, so that an empty one is a no-op
            engine.state.reset()
            self._finish(range(size))
            self._begin()

    @inferring
    def _both(self) -> CapturedEngine:
        """Return the engine of the rows, and keep that of one image, whose prefill a prompt takes."""
        engines, decision = self.engines, self.decision
        more = decision.strategy, decision.sampling, self.shape
        if self.size == 1:
            self.single = engines.get(1, *more)
            return self.single
        self.single = engines.get(1, *more, steps=False)
        ready = engines.get(self.size, *more)
        if self.single not in engines.ready:
            raise DoesNotFitError(
                f"an engine of {self.size} images and one of a single image do not fit the memory of "
                f"{self.backend.device} together; decode fewer images at once"
            )
        return ready

    # --- sharing the engine --------------------------------------------------------------------

    @property
    def _buffers(self) -> dict[str, Tensor]:
        """Everything of the engine that a request writes."""
        state = {f"state.{name}": one for name, one in self.engine.state.buffers.items()}
        return state | self.engine.changes

    @inferring
    def set_aside(self) -> None:
        """Copy the rows to host memory, so that others may use the engine until :meth:`take_up`.

        Raises :class:`DoesNotFitError` where the host has no memory for them.
        """
        if self._aside is not None:
            return
        need = sum(one.nbytes for one in self._buffers.values())
        free = self.backend.memory().left if self.backend.device.type == "cpu" else None
        if free is not None and need > free:
            raise DoesNotFitError(
                f"{format_bytes(need)} of buffers do not fit the {format_bytes(free)} free"
            )
        with explained(self.backend):
            copies = {name: one.to("cpu", copy=True) for name, one in self._buffers.items()}
        self._aside = copies, self.engine.now, self.engine.course

    @inferring
    def take_up(self) -> None:
        """Go on where :meth:`set_aside` stopped, on another engine of the same kind if need be."""
        if self.ready not in self.engines.ready:  # released, its buffers still hold the rows
            self.set_aside()
        if self._aside is None:
            return
        self.ready = self._both()
        (copies, length, course), engine = self._aside, self.engine
        with explained(self.backend):
            engine.session.progress.clear()
            for name, buffer in self._buffers.items():
                buffer.copy_(copies[name])
        course.engine = engine
        engine.now, engine.course, self._aside = length, course, None

    # --- rows ----------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine whose rows these are."""
        return self.ready.engine

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.engine.geometry.tokens

    @property
    def free(self) -> list[int]:
        """Rows without an image."""
        return [row for row in range(self.size) if row not in self._rows]

    @property
    def joinable(self) -> bool:
        """Whether an image may join now."""
        begun = self._rows and self.engine.course.index
        # Uniforms are counted by steps: images that take them begin together. Keys are a row's own.
        alike = self.engine.geometry.keyed or not begun
        return len(self._rows) < self.size and alike

    def known(self, row: int) -> int:
        """Return the tokens of a row's image that are known, as of the last look."""
        return self.engine.course.known[row]

    def _finish(self, rows: range | list[int]) -> None:
        """Set rows to complete. One copy of one shape, whichever rows they are."""
        length = self.engine.state.length
        kept = length.cpu()
        kept[list(rows)] = self.tokens - 1
        length.copy_(kept)

    def _begin(self) -> None:
        """Start counting again where no image is under way."""
        engine = self.engine
        engine.session.progress.clear()
        engine.state.step.fill_(1)
        engine.begin(SyncSchedule(first=True), known=self.tokens)

    @inferring
    def join(self, image: T, rows: Rows, seed: int, index: int) -> int:
        """Run the prompt of an image into a free row and return its number.

        ``rows``: of this one image; ``seed, index`` pick its random stream.
        """
        row = self.free[0]
        if not self._rows:
            self._begin()
        with explained(self.backend):
            self.single.begin(rows, seed, [index])
            if self.size > 1:
                self._copy(self.single.engine, row)
        finite, place = self.engine.finite, self._places[row][1]
        # Else a device that replays nothing would show what the last image left.
        now = torch.stack((self.engine.state.length, finite.count)).index_select(1, place)
        finite.report.index_copy_(1, place, now)
        self.engine.course.join(row)
        self._rows[row], self.images[row] = _Row(), image
        return row

    def _copy(self, single: Engine, row: int) -> None:
        """Copy what the prefill of one image left into a row."""
        engine, places = self.engine, self._places[row]
        given = {**single.state.buffers, "count": single.finite.count, "holds": single.finite.holds}
        taken = {**engine.state.buffers, "count": engine.finite.count, "holds": engine.finite.holds}
        for name, source in given.items():
            # Noise of one image may be a table where that of all rows is none.
            if name not in SHARED and source.numel() and taken[name].numel():
                taken[name].index_copy_(0, places[len(source)], source)
        prompt = single.geometry.prefix
        for mine, theirs in zip(engine.caches, single.caches, strict=True):
            at = places[theirs.layout.rows]
            for layer in range(theirs.layout.layers):
                sides = zip(mine.by_head(layer, prompt), theirs.by_head(layer, prompt), strict=True)
                for side, source in sides:
                    side.index_copy_(0, at, source)

    @inferring
    def advance(self) -> None:
        """Run some steps, and look how far every row is.

        Raises :class:`BackendError` where steps add no token to an image.
        """
        known = self.engine.course.known
        open_ = [self._rows[row] for row in self._rows if known[row] < self.tokens]
        if not open_:
            return
        with explained(self.backend):
            progress = self.engine.advance()
        for one in open_:
            one.drafts += progress.block.steps * (progress.block.length - 1)
        for row, passes in progress.failed.items():
            self._rows[row].failed = passes

    @inferring
    def so_far(self, row: int) -> Tensor:
        """Return the tokens of a row that are known, int64 ``[known]``, on the host."""
        tokens: Tensor = self.engine.state.tokens[row, : self.tokens]
        with torch.inference_mode(False):  # the caller's own
            return tokens.to("cpu", torch.int64, copy=True)[: self.known(row)]

    def news(self) -> Iterator[tuple[T, Drawn | NotFiniteError | int]]:
        """Yield every image with what came of it; one that is over has left its row.

        That is the complete image, the error that its logits were not finite, or else its row.
        """
        for row, one in sorted(self._rows.items()):
            image = self.images[row]
            if one.failed is not None:
                self.leave(row)
                yield image, self.engine.not_finite(row, one.failed)
            else:
                yield image, self._take(row) if self.known(row) >= self.tokens else row

    @inferring
    def _take(self, row: int) -> Drawn:
        decoded, drafts = self.engine.decoded(slice(row, row + 1)), self._rows[row].drafts
        del self._rows[row], self.images[row]
        return Drawn(decoded, drafts)

    @inferring
    def leave(self, row: int) -> None:
        """Drop the image of a row, and free it."""
        del self._rows[row], self.images[row]
        self.engine.course.known[row] = self.tokens
        with explained(self.backend):
            self._finish([row])
