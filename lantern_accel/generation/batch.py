"""The running batch: images join, advance and leave. Everything that generates images iterates it.

Images that begin together take one prefill and end together. In a batch whose images join, a row whose
image is complete takes the next one: its prompt is run by an engine of one image, and what that leaves
(keys and values, condition, counters) is copied into the row. Nothing is captured or compiled again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.host_loop import HostLoop, SyncSchedule
from lantern_accel.device.backend import Stopwatch
from lantern_accel.device.context import inferring
from lantern_accel.errors import DoesNotFitError, NotFiniteError, RequestError
from lantern_accel.families.base import Conditions, Rows, Size
from lantern_accel.generation.decision import BatchPlan, Decision
from lantern_accel.generation.engines import CapturedEngine, explain_errors
from lantern_accel.generation.forced import resume
from lantern_accel.generation.request import ImageJob
from lantern_accel.generation.runtime import Runtime
from lantern_accel.records import format_bytes
from lantern_accel.strategy.values import Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image

#: What all rows share and a row that joins leaves alone.
SHARED = ("step",)


T = TypeVar("T")
J = TypeVar("J", bound=ImageJob)
#: Decodes the tokens of rows, of which the first are of these images, to an image each; or to none.
MakeImages = Callable[[Decoded, Sequence[J]], "list[Image]"]


@dataclass(frozen=True)
class Known(Generic[J]):
    """An image is under way: tokens that are known, and a partial image with its finished pixel rows."""

    image: J
    known: int
    preview: Image | None = None
    rows: int = 0


@dataclass(frozen=True)
class Done(Generic[J]):
    """Images are complete: a row of ``decoded`` for each, and its pixels where anything paints."""

    images: tuple[J, ...]
    decoded: Decoded
    rendered: list[Image]
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure(Generic[J]):
    """Images have failed by themselves: logits were not finite, or no pixels could be made."""

    images: tuple[J, ...]
    error: Exception


BatchEvent = Known[J] | Done[J] | Failure[J]


class Phases:
    """Seconds by phase, with the device's pending work and without the seconds of inner phases."""

    def __init__(self, watch: Callable[[], Stopwatch]) -> None:
        self.seconds = dict.fromkeys(("text", "prefill", "decode", "pixels"), 0.0)
        self._watch, self._inner = watch, 0.0

    @contextmanager
    def count_seconds(self, phase: str) -> Iterator[Stopwatch]:
        """Count the seconds of the block."""
        outer, self._inner = self._inner, 0.0
        try:
            with self._watch() as one:
                yield one
            self.seconds[phase] += one.seconds - self._inner
            outer += one.seconds
        finally:
            self._inner = outer


class Batch(Generic[J]):
    """Rows of one engine for images of one strategy, one set of sampling settings and one shape.

    The engines are used by one thread; nobody else may use them meanwhile, unless :meth:`set_aside` was
    called.
    """

    def __init__(
        self,
        runtime: Runtime,
        part: BatchPlan,
        sampling: Sampling,
        shape: Hashable,
        make_images: MakeImages[J] | None = None,
        phases: Phases | None = None,
        *,
        joins: bool = False,
    ) -> None:
        """Make the rows that a decision's ``part`` names.

        ``shape``: of the images' conditions; ``make_images``: makes their pixels, None leaves tokens.
        ``joins``: images join and leave one by one, which needs an engine of one image too. Raises
        :class:`DoesNotFitError` where the two do not fit together.
        """
        self.runtime, self.backend, self.engines = runtime, runtime.backend, runtime.engines
        self.strategy, self.sampling, self.shape = part.strategy, sampling, shape
        self.size, self.joins, self.make_images = part.rows, joins, make_images
        self.phases = phases or Phases(self.backend.stopwatch)
        self._rows: dict[int, J] = {}
        #: The engine's buffers, the length of its next step and its rows, while others use it.
        self._aside: tuple[dict[str, Tensor], int, HostLoop] | None = None
        self.ready = self._open()
        if joins:
            self._empty()

    @inferring
    def _open(self) -> CapturedEngine:
        """Return the engine of the rows; where images join, keep an engine of one image for prompts."""

        def get(rows: int, steps: bool = True) -> CapturedEngine:
            return self.engines.get(rows, self.strategy, self.sampling, self.shape, steps)

        if not self.joins or self.size == 1:
            self.single = get(self.size)
            return self.single
        self.single, ready = get(1, steps=False), get(self.size)
        if self.single not in self.engines.ready:
            raise DoesNotFitError(
                f"an engine of {self.size} images and one of a single image do not fit the memory of "
                f"{self.backend.device} together; decode fewer images at once"
            )
        return ready

    @inferring
    def _empty(self) -> None:
        """Finish every row, so that a step is a no-op on those without an image."""
        one = torch.tensor([0])
        branches = torch.arange(self.engine.geometry.branches) * self.size
        #: Where a row's entries are in buffers of images, and in buffers of rows.
        self._places = {
            row: {len(part): (part + row).to(self.backend.device) for part in (one, branches)}
            for row in range(self.size)
        }
        self.engine.state.reset()
        self._finish(range(self.size))
        self._restart()

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
        with explain_errors(self.backend):
            copies = {name: one.to("cpu", copy=True) for name, one in self._buffers.items()}
        self._aside = copies, self.engine.now, self.engine.course

    @inferring
    def take_up(self) -> None:
        """Go on where :meth:`set_aside` stopped, on another engine of the same kind if need be."""
        if self.ready not in self.engines.ready:  # released, its buffers still hold the rows
            self.set_aside()
        if self._aside is None:
            return
        self.ready = self._open()
        (copies, length, course), engine = self._aside, self.engine
        with explain_errors(self.backend):
            engine.session.progress.clear()
            for name, buffer in self._buffers.items():
                buffer.copy_(copies[name])
        course.engine = weakref.proxy(engine)
        engine.now, engine.course, self._aside = length, course, None

    # --- rows ----------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that decodes the rows."""
        return self.ready.engine

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.engine.geometry.tokens

    @property
    def images(self) -> list[J]:
        """The images under way, by row."""
        return [self._rows[row] for row in sorted(self._rows)]

    @property
    def joinable(self) -> bool:
        """Whether an image may join now."""
        begun = self._rows and self.engine.course.index
        # Uniforms are counted by steps: images that take them begin together. Keys are a row's own.
        alike = self.engine.geometry.keyed or not begun
        return len(self._rows) < self.size and alike

    @property
    def known(self) -> int:
        """Tokens that are known of the slowest image, as of the last look; all where none is left."""
        every = self.engine.course.known
        return min((every[row] for row in self._rows), default=self.tokens)

    def _finish(self, rows: range | list[int]) -> None:
        """Set rows to complete. One copy of one shape, whichever rows they are."""
        length = self.engine.state.length
        lengths = length.cpu()
        lengths[list(rows)] = self.tokens - 1
        length.copy_(lengths)

    def _restart(self) -> None:
        """Start counting again where no image is under way."""
        engine = self.engine
        engine.session.progress.clear()
        engine.state.step.fill_(1)
        engine.begin(SyncSchedule(first=True), known=self.tokens)

    @inferring
    def begin(
        self,
        images: Sequence[J],
        rows: Rows,
        known: Tensor | None = None,
        *,
        watched: bool = False,
        step: Callable[[], None] | None = None,
    ) -> None:
        """Run the prompts of images that begin together, in one pass.

        ``rows``: of every row of the engine; those behind the images only fill the batch. ``known``: the
        first tokens of every row, integer ``[B, n]``, from which they go on. ``watched``: somebody wants
        to know how far they are. ``step`` runs in place of the captured steps.
        """
        engine, every = self.engine, fill_rows(images, self.size)
        with explain_errors(self.backend), self.phases.count_seconds("prefill"):
            self.ready.begin(rows, [one.seed for one in every], [one.number for one in every])
            if len(images) < self.size:
                engine.leave_out(len(images))
            if known is not None:
                resume(engine, known)
        first = 1 if known is None else known.shape[1]
        engine.begin(engine.schedule(watched), first, step)
        self._rows = dict(enumerate(images))

    @inferring
    def join(self, image: J, rows: Rows, known: Tensor | None = None) -> None:
        """Run the prompt of an image into a free row; ``rows``: of this one image.

        ``known``: its first tokens, integer ``[1, n]``, from which it goes on.
        """
        row = next(row for row in range(self.size) if row not in self._rows)
        if not self._rows:
            self._restart()
        count = 1 if known is None else known.shape[1]
        with explain_errors(self.backend), self.phases.count_seconds("prefill"):
            self.single.begin(rows, [image.seed], [image.number])
            if known is not None:
                resume(self.single.engine, known)
            if self.size > 1:
                self._copy(self.single.engine, row, self.engine.geometry.prefix + count - 1)
        finite, place = self.engine.finite, self._places[row][1]
        # Else a device that replays nothing would show what the last image left.
        now = torch.stack((self.engine.state.length, finite.count)).index_select(1, place)
        finite.report.index_copy_(1, place, now)
        self.engine.course.join(row, count)
        self._rows[row] = image

    def _copy(self, single: Engine, row: int, slots: int) -> None:
        """Copy what one image has so far into a row; ``slots`` of its caches are in use."""
        engine, places = self.engine, self._places[row]
        given = {**single.state.buffers, "count": single.finite.count, "holds": single.finite.holds}
        taken = {**engine.state.buffers, "count": engine.finite.count, "holds": engine.finite.holds}
        for name, source in given.items():
            # Noise of one image may be a table, and noise of all rows none.
            if name not in SHARED and source.numel() and taken[name].numel():
                taken[name].index_copy_(0, places[len(source)], source)
        for mine, theirs in zip(engine.caches, single.caches, strict=True):
            at = places[theirs.layout.rows]
            for layer in range(theirs.layout.layers):
                sides = zip(mine.by_head(layer, slots), theirs.by_head(layer, slots), strict=True)
                for side, source in sides:
                    side.index_copy_(0, at, source)

    @inferring
    def advance(self, stop: Callable[[], object] | None = None) -> list[BatchEvent[J]]:
        """Run some steps, and return what came of every image; one that joined leaves at its end.

        ``stop`` is called before each step. Where that is true, the steps end there and may go on later;
        what it raises comes out as it is. Raises :class:`BackendError` where steps add no token.
        """
        engine, known, failed = self.engine, self.engine.course.known, dict[int, int]()
        open_ = [one for row, one in self._rows.items() if known[row] < self.tokens]
        if open_:
            with explain_errors(self.backend):
                progress = engine.course.advance(stop)
            failed.update(progress.failed)
            for one in open_:
                one.drafts += progress.block.steps * (progress.block.length - 1)
        if failed and not self.joins:  # a row that fills the batch is the last image again
            row = min(min(failed), len(self._rows) - 1)
            image, error = self._rows[row], engine.not_finite(row, failed[min(failed)])
            return [Failure((image,), NotFiniteError(row, error.step, error.dtype, image.index))]
        if not self.joins and self.known == self.tokens:
            engine.finish()
            return [self._complete(list(self._rows))]
        events: list[BatchEvent[J]] = []
        for row in sorted(self._rows):
            image = self._rows[row]
            if row in failed:
                self.leave(image)
                events.append(Failure((image,), engine.not_finite(row, failed[row])))
            elif self.joins and known[row] == self.tokens:
                events.append(self._complete([row]))
            else:
                events.append(self._under_way(image, known[row]))
        return events

    def _under_way(self, image: J, known: int) -> Known[J]:
        """Return how far an image is, with the next partial image where its share is known."""
        if known * (image.partials + 1) // self.tokens > image.shown < image.partials:
            with self.phases.count_seconds("pixels"):
                preview, rows = self.runtime.partial_image(self.so_far(image), self.shape)
            image.shown += preview is not None  # else no row is finished yet
            return Known(image, known, preview, rows)
        return Known(image, known)

    def _complete(self, rows: list[int]) -> Done[J] | Failure[J]:
        """Decode complete images: all rows, or one, which is free then."""
        images = tuple(self._rows[row] for row in rows)
        made = self.engine.read_tokens(slice(rows[0], rows[0] + 1) if self.joins else slice(None))
        if self.joins:
            del self._rows[rows[0]]
        try:
            with self.phases.count_seconds("pixels") as watch:
                rendered = [] if self.make_images is None else self.make_images(made, images)
        except Exception as error:
            return Failure(images, error)
        own = Decoded(**{name: value[: len(rows)] for name, value in vars(made).items()})
        return Done(images, own, rendered, watch.seconds)

    def run(self, stop: Callable[[], object] | None = None) -> Done[J]:
        """Advance images that have begun together to their end; raises what one failed with."""
        with self.phases.count_seconds("decode"):
            while True:
                event = self.advance(stop)[0]
                if isinstance(event, Failure):
                    raise event.error
                if isinstance(event, Done):
                    return event

    def _row(self, image: J) -> int:
        return next(row for row, one in self._rows.items() if one is image)

    @inferring
    def so_far(self, image: J) -> Tensor:
        """Return the tokens of an image that are known, int64 ``[known]``, on the host."""
        row = self._row(image)
        tokens: Tensor = self.engine.state.tokens[row, : self.tokens]
        with torch.inference_mode(False):  # the caller's own
            return tokens.to("cpu", torch.int64, copy=True)[: self.engine.course.known[row]]

    def snapshot(self) -> dict[int, Tensor]:
        """Return the tokens that are known by the images' indices; they go on from these."""
        return {one.index: self.so_far(one) for one in self.images}

    @inferring
    def leave(self, image: J) -> None:
        """Drop an image, and free its row."""
        row = self._row(image)
        del self._rows[row]
        self.engine.course.known[row] = self.tokens
        with explain_errors(self.backend):
            self._finish([row])


def fill_rows(images: Sequence[T], rows: int) -> list[T]:
    """Return an image for each row: the first ones, and the last one again for those left over."""
    return [*images[:rows], *[images[-1]] * (rows - len(images))]


def joined_batch(
    runtime: Runtime,
    asked: Strategy,
    sampling: Sampling,
    first: Conditions,
    images: int,
    batch: int | None,
    size: Size | None = None,
    make_images: MakeImages[J] | None = None,
    phases: Phases | None = None,
) -> tuple[Decision, Batch[J]]:
    """Decide what ``images`` are decoded with, ``batch`` at once, and make rows that they join.

    ``first``: of the first image; all have its shape. ``size``: the width and height of the request.
    """

    def rows(count: int) -> Rows:
        return runtime.rows(first.pick([0] * count), sampling)

    found = runtime.decide(asked, sampling, first.shape, rows, images, batch, size, joins=True)
    part = found.parts[0]
    return found, Batch(runtime, part, sampling, first.shape, make_images, phases, joins=True)


def image_maker(runtime: Runtime, shape: Hashable) -> MakeImages[J]:
    """Return what decodes images; it raises RequestError for a model that leaves tokens here."""

    def make_images(decoded: Decoded, images: Sequence[J]) -> list[Image]:
        if made := runtime.decode_images(decoded.tokens, shape, images):
            return made
        raise RequestError(
            f"the model {runtime.model.manifest.name!r} makes tokens here and no images; load it with "
            "what paints images"
        )

    return make_images
