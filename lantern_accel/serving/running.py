"""The batch that a service runs: images join, advance and leave.

Those with the settings of the running batch join it as rows become free. The first one with others waits
until the batch has run out, and then has an engine of its own settings. An image that is alone has an
engine of one row, which is faster. It moves to the engine of all rows when a second image comes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.nn.functional import pad

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.device.context import inferring
from lantern_accel.errors import DoesNotFitError, RequestError, collect_warnings
from lantern_accel.families.base import Conditions
from lantern_accel.generation.batch import (
    Batch,
    BatchEvent,
    Done,
    MakeImages,
    image_maker,
    joined_batch,
)
from lantern_accel.generation.request import GenerationRequest
from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.queue import Job, QueuedImage

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

log = logging.getLogger("lantern_accel.serving")


class RunningBatch:
    """A batch of ``size`` rows on one pipeline; used by one thread."""

    def __init__(self, pipeline: Pipeline, size: int, metrics: Metrics) -> None:
        self.pipeline, self.size, self.metrics = pipeline, size, metrics
        self.backend = pipeline.backend
        self._batch: Batch[QueuedImage] | None = None
        #: The batch of all rows, and the one of a row where images can move out of it.
        self._whole: Batch[QueuedImage] | None = None
        self._alone: Batch[QueuedImage] | None = None
        #: What the images of the running batch have in common.
        self._shared: object = None
        #: Whether an image waits for one that is alone in its batch.
        self.crowded = False

    @property
    def images(self) -> list[QueuedImage]:
        """The images that are being generated, by row."""
        return [] if self._batch is None else self._batch.images

    @property
    def batch(self) -> Batch[QueuedImage]:
        """The rows of the running batch."""
        assert self._batch is not None
        return self._batch

    @contextmanager
    def _count_seconds(self, stage: str, job: Job) -> Iterator[None]:
        """Count the seconds of the block for a stage of this job."""
        with self.backend.stopwatch() as watch:
            yield
        job.spent[stage] += watch.seconds

    def open(self, request: GenerationRequest, conditions: Conditions) -> None:
        """Make the engines of a request's settings, in place of those before."""
        self._forget()
        self._whole = self._make(request, conditions, self.size)
        if self.size > 1:
            with suppress(DoesNotFitError):
                self._alone = self._make(request, conditions, 1)
            # The other one may have taken its memory.
            if self._whole.ready not in self.pipeline.engines.ready:
                self._alone, self._whole = None, self._make(request, conditions, self.size)
            if not (_movable(self._whole) and self._alone and _movable(self._alone)):
                self._alone = None
        self._batch = self._whole

    def _make(self, request: GenerationRequest, first: Conditions, size: int) -> Batch[QueuedImage]:
        runtime, sampling = self.pipeline.runtime, request.sampling
        strategy = self.pipeline.measurements.tune_strategy(request.strategy, size, sampling)
        make_images: MakeImages[QueuedImage] = image_maker(runtime, first.shape)
        return joined_batch(
            runtime, strategy, sampling, first, size, size, make_images=make_images
        )[1]

    def _forget(self) -> None:
        self._batch = self._whole = self._alone = self._shared = None

    @inferring
    def join(self, image: QueuedImage, others: bool = False) -> bool:
        """Let an image join; returns False where it has to wait. ``others``: more wait behind it."""
        job, request = image.job, image.job.request.generation
        if job.over:
            return True
        if image.conditions is None:
            with self._count_seconds("text", job):
                self._read(image)
        assert image.conditions is not None and image.rows is not None
        shared = (request.strategy, request.sampling, image.conditions.shape)
        if self._batch is None or shared != self._shared:
            if self.images:
                return False
            with self._count_seconds("engine", job):
                self.open(request, image.conditions)
            self._shared = shared
        if not self.images:
            self._batch = self._whole if others or self._alone is None else self._alone
        if self.batch is self._alone and self.images:
            self.crowded = True
        if not self.batch.joinable:
            return False
        with self._count_seconds("prefill", job):
            self.batch.join(image, image.rows)
        job.begin()
        return True

    def widen(self) -> None:
        """Move an image that is no longer alone to the batch of all rows, where it goes on."""
        assert self._whole is not None
        self.crowded = False
        for one in self.images:
            assert one.rows is not None
            row, known = self.batch.engine.read_tokens(slice(0, 1)), self.batch.so_far(one)
            self._whole.join(one, one.rows, known[None])
            one.earlier = row if one.earlier is None else _add_counters(row, one.earlier)
            self.batch.leave(one)
        self._batch = self._whole

    def _read(self, image: QueuedImage) -> None:
        """Turn the prompt into what an engine starts from."""
        request, runtime = image.job.request.generation, self.pipeline.runtime
        against, field = request.negative_prompt, "prompt"
        try:
            with collect_warnings() as notes:
                conditions = runtime.conditions(request.prompts, request.size, against)
                field = "negative_prompt" if against else field
                rows = runtime.rows(conditions, request.sampling, against, request.size)
        except RequestError as error:
            error.field = error.field or field
            raise
        image.conditions, image.rows = conditions, rows
        image.job.notes = tuple(dict.fromkeys((*image.job.notes, *notes)))

    def advance(self) -> list[BatchEvent[QueuedImage]]:
        """Run some steps; return what came of every image. A job that is over ends them at once."""
        images, phases = self.images, self.batch.phases
        before = phases.seconds["decode"]
        with collect_warnings() as warned, phases.count_seconds("decode"):
            events = self.batch.advance(lambda: any(one.job.over for one in images))
        for job in {one.job for one in images}:
            job.spent["decode"] += phases.seconds["decode"] - before
        for text in dict.fromkeys(warned):
            log.warning("%s", text)
        self.metrics.turns.inc()
        return [_with_earlier(event) for event in events]

    def drop_finished(self) -> int:
        """Free the rows of jobs that are over; return how many."""
        over = [one for one in self.images if one.job.over]
        for one in over:
            self.batch.leave(one)
        return len(over)

    def abandon(self) -> None:
        """Let go of the batch and its engines, after an error of the device."""
        self._forget()
        try:
            self.pipeline.release_engines()
        except Exception as late:  # a device that failed may fail at that too
            log.error("its buffers could not be freed", exc_info=late)


def _movable(batch: Batch[QueuedImage]) -> bool:
    """Return whether images go on elsewhere: the seed decides each token, and no drafter has read any."""
    return batch.engine.geometry.keyed and not batch.strategy.needs_drafter


def _add_counters(one: Decoded, earlier: Decoded) -> Decoded:
    """Return an image with the counters of the steps that another batch ran before."""
    width = max(one.histogram.shape[1], earlier.histogram.shape[1])
    counts, before = (
        pad(each.histogram, (0, width - each.histogram.shape[1])) for each in (one, earlier)
    )
    return Decoded(
        one.tokens,
        one.steps + earlier.steps,
        counts + before,
        one.quality_loss + earlier.quality_loss,
    )


def _with_earlier(event: BatchEvent[QueuedImage]) -> BatchEvent[QueuedImage]:
    if isinstance(event, Done) and (earlier := event.images[0].earlier):
        return replace(event, decoded=_add_counters(event.decoded, earlier))
    return event
