"""The batch that a service runs: images join, advance and leave.

Those with the settings of the running batch join it as rows become free. The first one with others waits
until the batch has run out, and then has an engine of its own settings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lantern_accel.device.context import inferring
from lantern_accel.errors import RequestError, noted
from lantern_accel.families.base import Conditions
from lantern_accel.generation.batch import Batch, BatchEvent, Paint, joined_batch, painting
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
        #: What the images of the running batch have in common.
        self._shared: object = None

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
    def _counted(self, stage: str, job: Job) -> Iterator[None]:
        """Count the seconds of the block for a stage of this job."""
        with self.backend.stopwatch() as watch:
            yield
        job.spent[stage] += watch.seconds

    def open(self, request: GenerationRequest, conditions: Conditions) -> None:
        """Make the engine of a request's settings, in place of the one before."""
        pipeline, sampling = self.pipeline, request.sampling
        strategy = pipeline.measurements.tuned(request.strategy, self.size, sampling)
        self._batch = self._shared = None
        asked = strategy, request.sampling, conditions, self.size, self.size
        paint: Paint[QueuedImage] = painting(pipeline.runtime, conditions.shape)
        self._batch = joined_batch(pipeline.runtime, *asked, paint=paint)[1]

    @inferring
    def join(self, image: QueuedImage) -> bool:
        """Let an image join; returns False where it has to wait."""
        job, request = image.job, image.job.request.generation
        if job.over:
            return True
        if image.conditions is None:
            with self._counted("text", job):
                self._read(image)
        assert image.conditions is not None and image.rows is not None
        shared = (request.strategy, request.sampling, image.conditions.shape)
        if self._batch is None or shared != self._shared:
            if self.images:
                return False
            with self._counted("engine", job):
                self.open(request, image.conditions)
            self._shared = shared
        if not self.batch.joinable:
            return False
        with self._counted("prefill", job):
            self.batch.join(image, image.rows)
        job.begin()
        return True

    def _read(self, image: QueuedImage) -> None:
        """Turn the prompt into what an engine starts from."""
        request, runtime = image.job.request.generation, self.pipeline.runtime
        against, field = request.negative_prompt, "prompt"
        try:
            with noted() as notes:
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
        with noted() as warned, phases.timed("decode"):
            events = self.batch.advance(lambda: any(one.job.over for one in images))
        for job in {one.job for one in images}:
            job.spent["decode"] += phases.seconds["decode"] - before
        for text in dict.fromkeys(warned):
            log.warning("%s", text)
        self.metrics.turns.inc()
        return events

    def drop_finished(self) -> int:
        """Free the rows of jobs that are over; return how many."""
        over = [one for one in self.images if one.job.over]
        for one in over:
            self.batch.leave(one)
        return len(over)

    def abandon(self) -> None:
        """Let go of the batch and its engines, after an error of the device."""
        self._batch = self._shared = None
        try:
            self.pipeline.release_engines()
        except Exception as late:  # a device that failed may fail at that too
            log.error("its buffers could not be freed", exc_info=late)
