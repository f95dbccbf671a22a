"""Images while they are generated: ``for event in pipeline.stream(...)``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.device.context import inference
from lantern_accel.device.entry_points import why
from lantern_accel.errors import RequestError
from lantern_accel.generation.batch import (
    Batch,
    Done,
    Failure,
    Phases,
    joined_batch,
)
from lantern_accel.generation.request import ImageJob
from lantern_accel.generation.result import GenerationResult, PhaseSeconds, png_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.families.base import Conditions
    from lantern_accel.generation.decision import Decision
    from lantern_accel.generation.request import GenerationRequest, RequestLock
    from lantern_accel.generation.runtime import Runtime


@dataclass(frozen=True)
class ImageProgress:
    """The progress of one image of a request.

    ``index``: the image's number; ``tokens``: the committed ones of ``total``, int64 ``[known]`` on the
    host; ``image``: the partial image, None without a new finished row; ``rows``: finished pixel rows;
    ``done``: the image is complete, and equals the image of ``generate``.
    """

    index: int
    tokens: Tensor
    total: int
    image: Image | None
    rows: int
    done: bool

    @property
    def known(self) -> int:
        """Number of committed tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        state = "done" if self.done else f"{self.known} of {self.total} tokens"
        return f"<ImageProgress: image {self.index}, {state}>"

    def _repr_png_(self) -> bytes | None:
        """Return the image for notebooks."""
        return None if self.image is None else png_bytes(self.image)


class Stream:
    """Iterates over the events of :meth:`~.pipeline.Pipeline.stream`; ``result`` is set at the end.

    Any thread may use the pipeline between two events. The caches of this stream are then copied to host
    memory and back, and its images stay the same. :meth:`close`, or the end of ``with``, frees the copy.
    """

    def __init__(
        self,
        runtime: Runtime,
        lock: RequestLock,
        request: GenerationRequest,
        partials: int,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self.request, self._on_step = request, on_step
        self._result: GenerationResult | None = None
        self._runtime, self._lock = runtime, lock
        self._phases, self._total = Phases(runtime.backend.stopwatch), 0.0
        #: Lets threads that share a stream take its events one after another.
        self._taking = threading.RLock()
        self._events: deque[ImageProgress] = deque()
        self._error: Exception | None = None
        self._over = False
        #: The prompts' conditions, the decision, and the running batch.
        self._begun: tuple[Conditions, Decision, Batch[ImageJob]] | None = None
        self._waiting = request.jobs(range(request.count), partials)
        self._done: dict[int, Done[ImageJob]] = {}

    def __iter__(self) -> Iterator[ImageProgress]:
        return self

    def __next__(self) -> ImageProgress:
        with self._taking:
            while not self._events:
                if self._error is not None:
                    error, self._error = self._error, None
                    self.close()
                    raise error
                if self._over:
                    raise StopIteration
                self._advance()
            return self._events.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the stream and free its memory; callable from any thread."""
        self._over = True
        self._events.clear()
        self._begun = None

    @property
    def result(self) -> GenerationResult:
        """The images and figures of the whole request; raises RequestError before its last event."""
        if self._result is None or self._events:
            raise RequestError("the stream has not ended yet; take all of its events first")
        return self._result

    def set_aside(self) -> None:
        """Copy the rows to the host while another call uses the engines; the next event raises errors."""
        if self._begun is None:
            return
        try:
            self._begun[-1].set_aside()
        except Exception as error:
            self._begun = None
            self._error = RequestError(
                f"another request used the device, and this stream could not be saved ({why(error)}); "
                "stream it again, or take its events without other calls in between"
            )

    def _advance(self) -> None:
        """Generate until there is an event, with the pipeline held."""
        with self._lock.hold(self):
            if self._error is not None:  # it was set aside while this call waited
                return
            try:
                backend = self._runtime.backend
                with inference(backend), backend.stopwatch() as total:
                    while not (self._events or self._over or self._error):
                        self._turn()
                self._total += total.seconds
                if len(self._done) == self.request.count and not self._over:
                    self._finish()
            except BaseException:  # an interrupt leaves rows that nobody can trust
                self.close()
                raise

    def _begin(self) -> tuple[Conditions, Decision, Batch[ImageJob]]:
        runtime, request, phases = self._runtime, self.request, self._phases
        with phases.count_seconds("text"):
            made = runtime.conditions(request.prompts, request.size, request.negative_prompt)

        def make_images(decoded: Decoded, images: Sequence[ImageJob]) -> list[Image]:
            return runtime.images_of(
                request, made.shape, decision, decision.parts[0], decoded, images
            )

        decision, batch = joined_batch(
            runtime, request.strategy, request.sampling, made, request.count, request.batch_size,
            request.size, make_images, phases,
        )  # fmt: skip
        self._begun = made, decision, batch
        return self._begun

    def _turn(self) -> None:
        """Let images join, run some steps, and keep what is new as events."""
        conditions, _, batch = self._begun or self._begin()
        batch.take_up()
        while self._waiting and batch.joinable and not self._check_stopped():
            job = self._waiting.pop(0)
            batch.join(job, self._runtime.rows_of(self.request, conditions, [job.index]))
        with self._phases.count_seconds("decode"):
            events = batch.advance(self._check_stopped)
        for event in events:
            if isinstance(event, Failure):
                self._error = event.error
                return
            if done := isinstance(event, Done):
                index, tokens = event.images[0].index, event.decoded.tokens[0]
                image = next(iter(event.rendered), None)
                rows = 0 if image is None else image.height
                self._done[index] = event
            else:
                index, tokens = event.image.index, batch.so_far(event.image)
                image, rows = event.preview, event.rows
            progress = ImageProgress(index, tokens, batch.tokens, image, rows, done)
            self._events.append(progress)

    def _check_stopped(self) -> bool:
        """Return whether the stream was closed; called before each prompt and each step."""
        if self._on_step is not None:
            self._on_step()
        return self._over

    def _finish(self) -> None:
        assert self._begun is not None
        _, decision, batch = self._begun
        ordered = [self._done[index] for index in range(self.request.count)]
        self._result = self._runtime.make_result(
            self.request,
            decision,
            [one.decoded for one in ordered],
            [image for one in ordered for image in one.rendered],
            PhaseSeconds(total=self._total, **self._phases.seconds),
            batch.engine.nbytes,
            self.request.num_images,
        )
        self._over, self._begun = True, None
