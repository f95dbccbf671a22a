"""Jobs, and the bounded queue of their images in the order in which they came.

Requests come in and events go out: what crosses the threads is a :class:`Job`, nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.families.base import Conditions, Rows
from lantern_accel.generation.batch import Done
from lantern_accel.generation.request import ImageJob
from lantern_accel.serving.body import ImageRequest
from lantern_accel.serving.refusals import NO_RETRY, Refusal, server_closing, wrong_value
from lantern_accel.strategy.values import Strategy

if TYPE_CHECKING:
    from PIL.Image import Image
    from prometheus_client import Gauge

#: What the seconds of a request go into: the queue, its prompt, an engine where the batch needed one, the
#: pass over the prompt, its steps (which images of a batch share), its images. The rest is others'.
STAGES = ("waiting", "text", "engine", "prefill", "decode", "pixels")


@dataclass(frozen=True)
class Partial:
    """A partial image of image ``index``; ``number`` counts from 0."""

    index: int
    number: int
    image: Image
    known: int
    tokens: int


@dataclass(frozen=True)
class Finished:
    """Image ``index``, complete, with what its decoding counted."""

    index: int
    image: Image
    done: Done[QueuedImage]
    text_tokens: int


@dataclass(frozen=True)
class Completed:
    """The last event of a job that went well: what it was decoded with, and what should be said.

    ``rounding``: total variation per token that the model's quantized weights add. ``stages``:
    seconds by :data:`STAGES`. ``peak``: bytes, the most that the device had in use since its batch was
    last empty; None where it reads no peak.
    """

    strategy: Strategy
    notes: tuple[str, ...]
    seconds: float
    rounding: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    peak: int | None = None


#: An error is the last event of a job that did not go well.
Event = Partial | Finished | Completed | Exception


@dataclass(eq=False)
class Job:
    """One request under way. ``deliver`` is called in the scheduler's thread; it must not block."""

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

    def end(self, event: Event) -> None:
        """Deliver the last event, once, from any thread."""
        if not self.over:
            self.over = True
            self.deliver(event)

    def cancel(self) -> None:
        """Give the job up, from any thread: what of it runs is stopped, what waits is dropped."""
        self.over = True


@dataclass(eq=False, kw_only=True)
class QueuedImage(ImageJob):
    """One image of a job, with what it starts from once that is known.

    ``earlier``: counters of its steps in a batch that it was moved out of.
    """

    job: Job
    conditions: Conditions | None = None
    rows: Rows | None = None
    earlier: Decoded | None = None


class Queue:
    """The images that wait: added from any thread, taken out by the thread that decodes.

    ``closing``: no more are taken; ``broken``: why the device is lost, None where it is not.
    """

    def __init__(self, most: int, gauge: Gauge) -> None:
        self.most, self._gauge = most, gauge
        self.closing = False
        self.broken: str | None = None
        self._stopped = False
        self._images: list[QueuedImage] = []
        self._news = threading.Condition()

    def put(self, job: Job, seconds: float) -> None:
        """Add a job's images, all or none; raises :class:`Refusal` for too many, and when closing.

        ``seconds``: what an image takes, to say when to come back.
        """
        body = job.request.body
        images = [
            QueuedImage(index, body.prompt, *seed, body.partial_images, job=job)
            for index, seed in enumerate(job.request.seeds)
        ]
        job.left = len(images)
        with self._news:
            if self.closing:
                raise server_closing()
            if self.broken is not None:
                lost = f"the server lost its device ({self.broken}); start it again"
                raise Refusal(503, lost, code="device_lost", headers=NO_RETRY)
            if len(images) > self.most:
                text = f"n cannot be {len(images)}: this server keeps {self.most} images at most"
                raise wrong_value("n", text)
            waiting = len(self._images)
            if waiting + len(images) > self.most:
                after = str(max(1, round(seconds * (waiting + 1))))
                full = f"{waiting} images wait, of at most {self.most}; try again in {after} s"
                raise Refusal(429, full, code="queue_full", headers={"Retry-After": after})
            self._set([*self._images, *images])

    def _set(self, images: list[QueuedImage]) -> None:
        self._images = images
        self._gauge.set(len(images))
        self._news.notify()

    @property
    def images(self) -> list[QueuedImage]:
        """The images that wait now, the first one first."""
        with self._news:
            return list(self._images)

    def take_out(self, wanted: Callable[[QueuedImage], bool]) -> list[QueuedImage]:
        """Take out the images that are chosen, and return them."""
        with self._news:
            found = [one for one in self._images if wanted(one)]
            self._set([one for one in self._images if not wanted(one)])
            return found

    def wait(self) -> bool:
        """Wait until an image is there; returns False where none is and none will come."""
        with self._news:
            while not (self._images or self._stopped):
                self._news.wait()
            return bool(self._images)

    def stop(self) -> None:
        """Let :meth:`wait` return, since none will come."""
        with self._news:
            self._stopped = True
            self._news.notify()
