"""Draws images: one thread that owns the pipeline, and a bounded queue in front of its slots.

Requests come in and events go out; what crosses the threads is a :class:`Job`, nothing else. Images are
drawn in the order in which they came. Those with the settings of the running batch join it as rows
become free; the first one with others waits until the batch has run out, and then has an engine of its
own settings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lantern_accel.device.backend import inferring
from lantern_accel.errors import BackendError, DeviceLostError, NotFiniteError, RequestError, noted
from lantern_accel.families.base import Conditions, Rows
from lantern_accel.generation.slots import Drawn, Slots
from lantern_accel.serving.body import Body, ImageRequest
from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.refusals import busy, lost, refusal_of, server_closing, too_late
from lantern_accel.strategy.values import AUTO, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.generation.pipeline import Pipeline

log = logging.getLogger("lantern_accel.serving")

#: What the seconds of a request go into: the queue, its prompt, an engine where the batch needed one, the
#: pass over the prompt, its steps (which images of a batch share), its pictures. The rest is others'.
STAGES = ("waiting", "text", "engine", "prefill", "decode", "pixels")
#: Images over which the time of one is averaged, to say when to come back.
MEMORY = 16


@dataclass(frozen=True)
class ServerSettings:
    """What a server is started with, beyond the pipeline, and what it takes on.

    ``slots``: rows of the batch; ``queue``: images that may wait; ``deadline``: seconds that a request
    has; ``keys``: API keys; ``most_body``: bytes; ``most_prompt``: characters; ``write_seconds``: after
    which a client that does not read is let go; ``grace``: seconds that a stop waits for what runs.
    ``silence``: seconds after which a stream that waits sends a comment; ``origins``: those whose pages
    may ask (``*``: all); ``root_path``: the path below which a proxy serves it.
    """

    slots: int = 1
    queue: int = 64
    deadline: float = 300.0
    keys: tuple[str, ...] = ()
    most_body: int = 1 << 20
    most_prompt: int = 4000
    write_seconds: float = 60.0
    grace: float = 300.0
    silence: float = 15.0
    origins: tuple[str, ...] = ()
    root_path: str = ""


@dataclass(frozen=True)
class Partial:
    """A picture of what is known of image ``index``; ``number`` counts from 0."""

    index: int
    number: int
    image: Image
    known: int
    tokens: int


@dataclass(frozen=True)
class Finished:
    """Image ``index``, complete, with what its decoding counted; no picture where ids were asked for."""

    index: int
    image: Image | None
    drawn: Drawn
    text_tokens: int


@dataclass(frozen=True)
class Completed:
    """The last event of a job that went well: what it was drawn with, and what should be said.

    ``rounding``: total variation per token that the model's weights in fewer bits cost. ``stages``:
    seconds by :data:`STAGES`. ``peak``: bytes, the most that the device had in use since its batch was
    last empty; None where it reads no peak.
    """

    strategy: Strategy
    notes: tuple[str, ...]
    seconds: float
    waited: float
    rounding: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    peak: int | None = None


#: An error is the last event of a job that did not go well.
Event = Partial | Finished | Completed | Exception


@dataclass
class Job:
    """One request under way. ``deliver`` is called in the studio's thread; it must not block."""

    request: ImageRequest
    deliver: Callable[[Event], None]
    came: float = field(default_factory=time.monotonic)
    began: float | None = None
    over: bool = False
    left: int = 0
    notes: tuple[str, ...] = ()
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def begin(self) -> None:
        """Note that the first image has begun."""
        if self.began is None:
            self.began = time.monotonic()
            self.spent["waiting"] = max(0.0, self.began - self.came - sum(self.spent.values()))

    def cancel(self) -> None:
        """Give the job up, from any thread: what of it runs is stopped, what waits is dropped."""
        self.over = True


@dataclass
class Picture:
    """One image of a job, with what it starts from once that is known."""

    job: Job
    index: int
    seed: int
    stream: int
    conditions: Conditions | None = None
    rows: Rows | None = None
    partials: int = 0


class Studio:
    """Draws the images of jobs on one pipeline, in a thread of its own, until :meth:`stop`."""

    def __init__(self, pipeline: Pipeline, limits: ServerSettings, metrics: Metrics) -> None:
        self.pipeline, self.limits, self.metrics = pipeline, limits, metrics
        self.backend = pipeline.backend
        self.broken: str | None = None
        self._queue: deque[Picture] = deque()
        self._news = threading.Condition()
        self._closing = self._stopped = False
        self._slots: Slots[Picture] | None = None
        self._key: object = None
        self._each = 1.0
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="studio", daemon=True)

    # --- from other threads --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to draw; raises BackendError where the device is another process's."""
        if self.backend.unusable:
            raise BackendError(self.backend.unusable)
        self._thread.start()

    def warm_up(self, strategies: Sequence[str]) -> None:
        """Make the engines of these strategies before :meth:`start`, so that no request waits for it."""
        manifest = self.pipeline.model.manifest
        examples = self.pipeline.model.family.examples(manifest)
        for name in strategies:
            body, strategy = Body(prompt=examples[0]), self.pipeline.strategy(name)
            request = ImageRequest(body, strategy, self.pipeline.sampling(), ((0, 0),))
            self._open(request, self.pipeline.conditions(examples[:1]))

    def submit(self, *jobs: Job) -> None:
        """Queue jobs' images, all or none; raises :class:`Refusal` for too many, and when closing."""
        pictures_ = [
            Picture(job, number, *seed)
            for job in jobs
            for number, seed in enumerate(job.request.seeds)
        ]
        for job in jobs:
            job.left = len(job.request.seeds)
        with self._news:
            if self._closing:
                raise server_closing()
            if self.broken is not None:
                raise lost(self.broken)
            waiting = len(self._queue)
            if waiting + len(pictures_) > self.limits.queue:
                raise busy(self._each * (waiting + 1), waiting, self.limits.queue)
            self._queue.extend(pictures_)
            self.metrics.waiting.set(len(self._queue))
            self._news.notify()

    def drain(self) -> None:
        """Refuse what waits and what comes, and finish what runs."""
        with self._news:
            self._closing = True
            dropped = {id(one.job): one.job for one in self._queue if one.job.began is None}
            self._queue = deque(one for one in self._queue if one.job.began is not None)
            self._news.notify()
        for job in dropped.values():
            self._end(job, server_closing())

    def stop(self, seconds: float = 60.0) -> bool:
        """Drain, and wait for what runs; returns whether all of it was finished in time."""
        self.drain()
        with self._news:
            self._stopped = True
            self._news.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """``ok``, ``draining`` or ``failed``."""
        if self.broken is not None:
            return "failed"
        return "draining" if self._closing else "ok"

    # --- in its own thread ---------------------------------------------------------------------

    @property
    def running(self) -> dict[int, Picture]:
        """The images that are being drawn, by row."""
        return {} if self._slots is None else self._slots.images

    def _run(self) -> None:
        while True:
            with self._news:
                while not (self._queue or self.running or self._stopped):
                    self._news.wait()
                if self._stopped and not self._queue and not self.running:
                    return
            try:
                self._turn()
            except Exception as error:  # what runs fails with it; the next batch begins anew
                self._fail(error)

    def _turn(self) -> None:
        """Let images leave and join, run some steps, and hand out what is new."""
        self._give_up()
        self._admit()
        slots = self._slots
        if slots is None or not slots.images:
            return
        with self._timed(
            "decode", *{id(one.job): one.job for one in slots.images.values()}.values()
        ):
            slots.advance()
        self.metrics.turns.inc()
        for picture, one in slots.news():
            if isinstance(one, NotFiniteError):
                self._end(picture.job, one)
            elif isinstance(one, int):
                self._show(slots, one, picture)
            else:
                try:
                    self._finish(slots, picture, one)
                except Exception as error:  # its row is given up already
                    if not isinstance(error, RequestError):
                        log.error("a picture could not be made", exc_info=error)
                    self._end(picture.job, error)
        self.metrics.running.set(len(slots.images))

    def _give_up(self) -> None:
        """Free the rows and places of jobs that are over, or out of time."""
        now = time.monotonic()
        with self._news:
            waiting = list(self._queue)
        for job in {id(p.job): p.job for p in [*waiting, *self.running.values()]}.values():
            if not job.over and now - job.came > self.limits.deadline:
                self._end(job, too_late(self.limits.deadline))
        for row, picture in list(self.running.items()):
            if picture.job.over and self._slots is not None:
                self._slots.leave(row)
                self.metrics.dropped.inc()
        with self._news:
            kept = deque(one for one in self._queue if not one.job.over)
            self.metrics.dropped.inc(len(self._queue) - len(kept))
            self._queue = kept

    @contextmanager
    def _timed(self, stage: str, *jobs: Job) -> Iterator[None]:
        """Count the seconds of the block for a stage of these jobs."""
        with self.backend.stopwatch() as watch:
            yield
        for job in jobs:
            job.spent[stage] += watch.seconds

    def _admit(self) -> None:
        """Let the first images of the queue join, as long as they go with those that run."""
        if not self.running:
            self.backend.reset_peak_memory()
        while True:
            with self._news:
                if not self._queue:
                    break
                picture = self._queue[0]
            try:
                joined = self._join(picture)
            except Exception as error:
                self._end(picture.job, error)
                if not isinstance(error, RequestError):
                    log.warning("an image could not begin: %s", error)
                joined = True
            if not joined:
                break
            with self._news:
                if self._queue and self._queue[0] is picture:
                    self._queue.popleft()
        with self._news:
            self.metrics.waiting.set(len(self._queue))
        self.metrics.running.set(len(self.running))

    @inferring
    def _join(self, picture: Picture) -> bool:
        """Let an image join; returns False where it has to wait."""
        job = picture.job
        if job.over:
            return True
        if picture.conditions is None:
            with self._timed("text", job):
                self._read(picture)
        assert picture.conditions is not None and picture.rows is not None
        request = job.request
        key = (request.strategy, request.sampling, picture.conditions.shape)
        if self._slots is None or key != self._key:
            if self.running:
                return False
            with self._timed("engine", job):
                self._open(request, picture.conditions)
            self._key = key
        assert self._slots is not None
        if not self._slots.joinable:
            return False
        with self._timed("prefill", job):
            self._slots.join(picture, picture.rows, picture.seed, picture.stream)
        job.begin()
        return True

    def _open(self, request: ImageRequest, conditions: Conditions) -> None:
        pipeline, size = self.pipeline, self.limits.slots
        strategy = request.strategy
        if strategy.name != AUTO:  # as `generate` does with a strategy by name
            strategy = pipeline.auto.tuned(strategy, size, request.sampling)
        self._slots = self._key = None
        self._slots = Slots(pipeline.runtime, strategy, request.sampling, size, conditions)

    def _read(self, picture: Picture) -> None:
        """Turn the prompt into what an engine starts from."""
        request, model = picture.job.request, self.pipeline.model
        with noted() as notes:
            if request.ids is None:
                conditions = self.pipeline.conditions([request.body.prompt], request.size)
            else:
                family: Any = model.family
                conditions = family.conditions_of(
                    model, [request.ids], self.backend.device, request.grid
                )
            against = request.body.negative_prompt
            rows = self.pipeline.runtime.rows(conditions, request.sampling, against, request.size)
        picture.conditions, picture.rows = conditions, rows
        picture.job.notes = tuple(dict.fromkeys((*picture.job.notes, *notes)))

    @inferring
    def _finish(self, slots: Slots[Picture], picture: Picture, drawn: Drawn) -> None:
        """Decode a complete image and hand it out; the last one completes its job."""
        job = picture.job
        assert picture.conditions is not None
        shape = picture.conditions.shape
        image = None
        if job.request.ids is None:
            with noted() as told, self._timed("pixels", job):
                seed = picture.seed + picture.stream
                made = self.pipeline.runtime.pictures(
                    drawn.decoded.tokens, shape, [job.request.body.prompt], [seed]
                )
            if not made:
                log.warning("%s", "; ".join(told))
                raise RequestError(
                    f"the model {self.pipeline.model.manifest.name!r} draws tokens here and no "
                    "pictures; POST /generate gives these"
                )
            image = made[0]
        now = time.monotonic()
        since, self._last = now - max(self._last, job.began or now), now
        self._each += (since - self._each) / MEMORY
        self.metrics.drew(drawn)
        text = int(picture.conditions.mask.sum())
        if job.over:
            return
        job.deliver(Finished(picture.index, image, drawn, text))
        job.left -= 1
        if not job.left:
            began = job.began or now
            notes = (*job.request.notes, *job.notes)
            price = self.pipeline.model.rounding
            rounding = 0.0 if price is None else price.total_variation
            waited = began - job.came
            peak = self.backend.memory().peak
            seconds = now - began, waited
            self._end(job, Completed(slots.strategy, notes, *seconds, rounding, job.spent, peak))

    @inferring
    def _show(self, slots: Slots[Picture], row: int, picture: Picture) -> None:
        """Hand out a partial picture where its share of the image is known."""
        wanted = picture.job.request.body.partial_images
        if picture.partials >= wanted or picture.job.over:
            return
        assert picture.conditions is not None
        known, tokens = slots.known(row), slots.tokens
        due = -(-tokens * (picture.partials + 1) // (wanted + 1))
        if known < due:
            return
        image, _ = self.pipeline.runtime.partial_picture(
            slots.so_far(row), picture.conditions.shape
        )
        if image is None:  # no row is finished yet
            return
        event = Partial(picture.index, picture.partials, image, known, tokens)
        if not picture.partials:
            self.metrics.first_partial.observe(time.monotonic() - picture.job.came)
        picture.partials += 1
        picture.job.deliver(event)

    def _fail(self, error: Exception) -> None:
        """End what runs with an error of the device; the next request finds new slots."""
        log.error("the running batch failed: %s", error, exc_info=error)
        jobs = {id(one.job): one.job for one in self.running.values()}
        self._slots = self._key = None
        if isinstance(error, DeviceLostError):
            self.broken = str(error)
            with self._news:
                jobs |= {id(one.job): one.job for one in self._queue}
                self._queue.clear()
        for job in jobs.values():
            self._end(job, error)
        try:
            self.pipeline.release_engines()
        except Exception as late:  # a device that failed may fail at that too
            log.error("its buffers could not be freed", exc_info=late)

    def _end(self, job: Job, event: Event) -> None:
        if job.over:
            return
        job.over = True
        if isinstance(event, Exception):
            self.metrics.failed.labels(refusal_of(event).code or "invalid").inc()
        job.deliver(event)
