"""The rows of the running batch: images join, advance, are shown and leave.

Those with the settings of the running batch join it as rows become free. The first one with others waits
until the batch has run out, and then has an engine of its own settings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lantern_accel.device.context import inferring
from lantern_accel.errors import NotFiniteError, RequestError, noted
from lantern_accel.families.base import Conditions
from lantern_accel.generation.request import GenerationRequest
from lantern_accel.generation.slots import Drawn, Slots
from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.queue import Finished, Job, Partial, Picture
from lantern_accel.strategy.values import AUTO

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

log = logging.getLogger("lantern_accel.serving")


class Drawing:
    """A batch of ``size`` rows on one pipeline; used by one thread."""

    def __init__(self, pipeline: Pipeline, size: int, metrics: Metrics) -> None:
        self.pipeline, self.size, self.metrics = pipeline, size, metrics
        self.backend = pipeline.backend
        self._slots: Slots[Picture] | None = None
        #: What the images of the running batch have in common.
        self._shared: object = None

    @property
    def running(self) -> dict[int, Picture]:
        """The images that are being generated, by row."""
        return {} if self._slots is None else self._slots.images

    @property
    def slots(self) -> Slots[Picture]:
        """The rows of the running batch."""
        assert self._slots is not None
        return self._slots

    @contextmanager
    def _counted(self, stage: str, jobs: Iterable[Job]) -> Iterator[None]:
        """Count the seconds of the block for a stage of these jobs."""
        with self.backend.stopwatch() as watch:
            yield
        for job in jobs:
            job.spent[stage] += watch.seconds

    def open(self, request: GenerationRequest, conditions: Conditions) -> None:
        """Make the engine of a request's settings, in place of the one before."""
        pipeline, strategy = self.pipeline, request.strategy
        if strategy.name != AUTO:  # as `generate` does with a strategy by name
            strategy = pipeline.auto.tuned(strategy, self.size, request.sampling)
        self._slots = self._shared = None
        images = self.size, self.size
        self._slots = Slots(pipeline.runtime, strategy, request.sampling, conditions, *images)

    @inferring
    def join(self, picture: Picture) -> bool:
        """Let an image join; returns False where it has to wait."""
        job, request = picture.job, picture.job.request.generation
        if job.over:
            return True
        if picture.conditions is None:
            with self._counted("text", [job]):
                self._read(picture)
        assert picture.conditions is not None and picture.rows is not None
        shared = (request.strategy, request.sampling, picture.conditions.shape)
        if self._slots is None or shared != self._shared:
            if self.running:
                return False
            with self._counted("engine", [job]):
                self.open(request, picture.conditions)
            self._shared = shared
        if not self.slots.joinable:
            return False
        with self._counted("prefill", [job]):
            self.slots.join(picture, picture.rows, picture.seed, picture.stream)
        job.begin()
        return True

    def _read(self, picture: Picture) -> None:
        """Turn the prompt into what an engine starts from."""
        request, runtime = picture.job.request.generation, self.pipeline.runtime
        against, field = request.negative_prompt, "prompt"
        try:
            with noted() as notes:
                conditions = runtime.conditions(request.prompts, request.size, against)
                field = "negative_prompt" if against else field
                rows = runtime.rows(conditions, request.sampling, against, request.size)
        except RequestError as error:
            error.field = error.field or field
            raise
        picture.conditions, picture.rows = conditions, rows
        picture.job.notes = tuple(dict.fromkeys((*picture.job.notes, *notes)))

    def advance(self) -> Iterator[tuple[Picture, Drawn | NotFiniteError | int]]:
        """Run some steps; give every image with its end, or with its row where it goes on."""
        with self._counted("decode", {one.job for one in self.running.values()}):
            self.slots.advance()
        self.metrics.turns.inc()
        yield from self.slots.news()

    @inferring
    def finish(self, picture: Picture, drawn: Drawn) -> Finished:
        """Decode a complete image; raises RequestError for a model that makes none."""
        assert picture.conditions is not None
        prompts = [picture.job.request.body.prompt]
        with noted() as warned, self._counted("pixels", [picture.job]):
            made = self.pipeline.runtime.pictures(
                drawn.decoded.tokens,
                picture.conditions.shape,
                prompts,
                [picture.seed + picture.stream],
            )
        if not made:
            log.warning("%s", "; ".join(warned))
            raise RequestError(
                f"the model {self.pipeline.model.manifest.name!r} makes tokens here and no images; "
                "load it with what paints images"
            )
        text = int(picture.conditions.mask.sum())
        return Finished(picture.index, made[0], drawn, text)

    @inferring
    def show(self, picture: Picture, row: int) -> Partial | None:
        """Return a partial image where its share of the image is known, and one is wanted."""
        wanted, tokens = picture.job.request.body.partial_images, self.slots.tokens
        if picture.partials >= wanted or picture.job.over:
            return None
        known = self.slots.known(row)
        if known < -(-tokens * (picture.partials + 1) // (wanted + 1)):
            return None
        assert picture.conditions is not None
        so_far = self.slots.so_far(row)
        image, _ = self.pipeline.runtime.partial_picture(so_far, picture.conditions.shape)
        if image is None:  # no row is finished yet
            return None
        if not picture.partials:
            self.metrics.first_partial.observe(time.monotonic() - picture.job.came)
        picture.partials += 1
        return Partial(picture.index, picture.partials - 1, image, known, tokens)

    def drop_finished(self) -> int:
        """Free the rows of jobs that are over; return how many."""
        rows = [row for row, picture in self.running.items() if picture.job.over]
        for row in rows:
            self.slots.leave(row)
        return len(rows)

    def abandon(self) -> None:
        """Let go of the batch and its engines, after an error of the device."""
        self._slots = self._shared = None
        try:
            self.pipeline.release_engines()
        except Exception as late:  # a device that failed may fail at that too
            log.error("its buffers could not be freed", exc_info=late)
