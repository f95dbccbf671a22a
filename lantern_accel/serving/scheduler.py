"""Generates the images of jobs: one thread that owns the pipeline, behind a bounded queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import TYPE_CHECKING

from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    LanternError,
    NotFiniteError,
    RequestError,
)
from lantern_accel.generation.batch import Done, Failure, Known
from lantern_accel.generation.request import build_request
from lantern_accel.generation.result import loss_of
from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.queue import Completed, Event, Finished, Job, Partial, Queue, QueuedImage
from lantern_accel.serving.refusals import NO_RETRY, Refusal, refusal_of, server_closing
from lantern_accel.serving.running import RunningBatch

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

log = logging.getLogger("lantern_accel.serving")

#: Rows of a service's batch, at least where they fit: docs/serving.md has the measurement.
LEAST_SLOTS = 4
#: Images over which the time of one is averaged, to say when to come back.
MEMORY = 16


def usual_slots(pipeline: Pipeline) -> int:
    """Return the default number of images that a service decodes together; they fit the memory."""
    most = max(LEAST_SLOTS, pipeline.backend.preferences.default_batch)
    sampling = pipeline.model.manifest.defaults.sampling
    return max(1, pipeline.engines.capacity.largest(most, pipeline.strategy("auto"), sampling))


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, beyond its pipeline: its rows, and what it takes on.

    ``slots``: rows of the batch; ``queue``: images that may wait; ``deadline``: seconds that a request
    has; ``keys``: API keys; ``most_body``: bytes; ``most_prompt``: characters; ``read_seconds``: in which
    a head, and then its body, must come; ``write_seconds``: after which a client that does not read is
    let go; ``grace``: seconds that a stop waits for what runs.
    ``silence``: seconds after which a stream that waits sends a comment; ``origins``: pages of these
    may ask (``*``: all); ``root_path``: the path below which a proxy serves it.
    """

    slots: int = 1
    queue: int = 64
    deadline: float = 300.0
    keys: tuple[str, ...] = ()
    most_body: int = 1 << 20
    most_prompt: int = 4000
    read_seconds: float = 30.0
    write_seconds: float = 60.0
    grace: float = 300.0
    silence: float = 15.0
    origins: tuple[str, ...] = ()
    root_path: str = ""


class Scheduler:
    """Generates the images of jobs on one pipeline, in a thread of its own, until :meth:`stop`."""

    def __init__(self, pipeline: Pipeline, limits: ServerSettings, metrics: Metrics) -> None:
        self.pipeline, self.limits, self.metrics = pipeline, limits, metrics
        self.queue = Queue(limits.queue, metrics.waiting)
        self.batch = RunningBatch(pipeline, limits.slots, metrics)
        self._each = 1.0
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # --- from other threads --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to decode; raises BackendError where the device is another process's."""
        if self.pipeline.backend.unusable:
            raise BackendError(self.pipeline.backend.unusable)
        self._thread.start()

    def warm_up(self, strategies: Sequence[str]) -> None:
        """Make the engines of these strategies before :meth:`start`, so that no request waits for it."""
        example = self.pipeline.model.family.examples(self.pipeline.model.manifest)[0]
        for name in strategies:
            given = {"strategy": name}
            request = build_request(self.pipeline.model.manifest, example, given)
            self.batch.open(request, self.pipeline.conditions([example]))

    def submit(self, job: Job) -> None:
        """Queue a job's images, all or none; raises :class:`Refusal` for too many, and when closing."""
        if self._thread.ident is None:
            unused = (
                "the service was not started; run its lifespan in that of the application around it"
            )
            raise Refusal(503, unused, code="not_started", headers=NO_RETRY)
        self.queue.put(job, self._each)

    def drain(self) -> None:
        """Refuse what waits and what comes, and finish what runs."""
        self.queue.closing = True
        for one in self.queue.take_out(lambda one: one.job.began is None):
            self._end(one.job, server_closing())

    def stop(self, seconds: float) -> None:
        """Drain, wait for what runs, and refuse what was not finished in time."""
        self.drain()
        self.queue.stop()
        self._thread.join(seconds)
        for one in (*self.queue.images, *self.running):
            self._end(one.job, server_closing())

    @property
    def state(self) -> str:
        """``ok``, ``draining`` or ``failed``."""
        if self.queue.broken is not None:
            return "failed"
        return "draining" if self.queue.closing else "ok"

    @property
    def running(self) -> list[QueuedImage]:
        """The images that are being generated, by row."""
        return self.batch.images

    # --- in its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while self.running or self.queue.wait():
            try:
                self._turn()
            except Exception as error:  # what runs fails with it; the next one has a new batch
                self._fail(error)

    def _turn(self) -> None:
        """Let images leave and join, run some steps, and hand out what is new."""
        self._give_up()
        self._admit()
        if self.batch.crowded:  # outside of what a single job fails with
            self.batch.widen()
            self._admit()
        if not self.running:
            return
        for event in self.batch.advance():
            if isinstance(event, Known):
                self._show(event)
            elif isinstance(event, Done):
                self._finish(event)
            else:
                self._fail_image(event)
        self.metrics.running.set(len(self.running))

    def _give_up(self) -> None:
        """Free the rows and places of jobs that are over, or out of time."""
        now, deadline = time.monotonic(), self.limits.deadline
        late = (
            f"the images were not complete within {deadline:g} s; ask for fewer, or try again later"
        )
        for one in (*self.queue.images, *self.running):
            if now - one.job.came > deadline:
                self._end(one.job, Refusal(504, late, code="deadline_exceeded", headers=NO_RETRY))
        dropped = len(self.queue.take_out(lambda one: one.job.over))
        self.metrics.dropped.inc(dropped + self.batch.drop_finished())

    def _admit(self) -> None:
        """Let the first images of the queue join, as long as they go with the running ones."""
        if not self.running:
            self.pipeline.backend.memory(new_peak=True)
        waiting = self.queue.images
        for image in waiting:
            try:
                if not self.batch.join(image, others=image is not waiting[-1]):
                    break
            except Exception as error:
                self._end(image.job, error)
                if not isinstance(error, RequestError):
                    log.warning("an image could not begin: %s", error)
            self.queue.take_out(partial(is_, image))
        self.metrics.running.set(len(self.running))

    def _show(self, event: Known[QueuedImage]) -> None:
        """Hand out a partial image, if there is one."""
        one, job = event.image, event.image.job
        if event.preview is None or job.over:
            return
        if one.shown == 1:
            self.metrics.first_partial.observe(time.monotonic() - job.came)
        total = self.batch.batch.tokens
        job.deliver(Partial(one.index, one.shown - 1, event.preview, event.known, total))

    def _fail_image(self, event: Failure[QueuedImage]) -> None:
        """End the job of an image that failed by itself."""
        if not isinstance(event.error, RequestError | NotFiniteError):
            log.error("an image could not be made", exc_info=event.error)
        self._end(event.images[0].job, event.error)

    def _finish(self, event: Done[QueuedImage]) -> None:
        """Hand out a complete image; the last one completes its job."""
        (one,), (image,) = event.images, event.rendered
        job, now = one.job, time.monotonic()
        job.spent["pixels"] += event.seconds
        began = job.began or now
        since, self._last = now - max(self._last, began), now
        self._each += (since - self._each) / MEMORY
        self.metrics.drew(event.decoded)
        if job.over:
            return
        assert one.conditions is not None
        job.deliver(Finished(one.index, image, event, int(one.conditions.mask.sum())))
        job.left -= 1
        if job.left:
            return
        completed = Completed(
            self.batch.batch.strategy,
            notes=(*job.request.notes, *job.notes),
            seconds=now - job.came - job.spent["waiting"],
            rounding=loss_of(self.pipeline.model.rounding),
            stages=job.spent,
            peak=self.pipeline.backend.memory().peak,
        )
        self._end(job, completed)

    def _fail(self, error: Exception) -> None:
        """End what runs with an error of the device; the next request finds a new batch."""
        log.error("the running batch failed: %s", error, exc_info=error)
        failed = [*self.running]
        if isinstance(error, DeviceLostError):
            self.queue.broken = str(error)
            failed += self.queue.take_out(lambda one: True)
        for one in failed:
            self._end(one.job, error)
        self.batch.abandon()

    def _end(self, job: Job, event: Event) -> None:
        if job.over:
            return
        if isinstance(event, LanternError) and event.field:
            event.field = job.request.named(event.field)
        if isinstance(event, Exception) and (why := refusal_of(event)).outcome == "failed":
            self.metrics.failed.labels(why.code).inc()
        job.end(event)
