"""Images while they are generated: ``for event in pipeline.stream(...)``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.device.context import inference
from lantern_accel.device.entry_points import why
from lantern_accel.errors import LanternError, NotFiniteError, RequestError
from lantern_accel.generation.result import GenerationResult, PhaseSeconds, png_bytes
from lantern_accel.generation.slots import Drawn, Slots

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.device.backend import Backend
    from lantern_accel.families.base import Conditions
    from lantern_accel.generation.request import GenerationRequest, RequestLock
    from lantern_accel.generation.runtime import Runtime


@dataclass(frozen=True)
class Progress:
    """What is known of one image of a request.

    ``index`` of the image; ``tokens`` int64 ``[known]``, on the host, of ``total``; ``image``: the
    finished rows, None where no new row is finished; ``rows``: pixel rows of it that are decided;
    ``done``: the image is complete, and ``image`` is the one that ``generate`` would return.
    """

    index: int
    tokens: Tensor
    total: int
    image: Image | None
    rows: int
    done: bool

    @property
    def known(self) -> int:
        """Tokens that are decided."""
        return len(self.tokens)

    def __repr__(self) -> str:
        state = "done" if self.done else f"{self.known} of {self.total} tokens"
        return f"<Progress: image {self.index}, {state}>"

    def _repr_png_(self) -> bytes | None:
        """Return the image for notebooks."""
        return None if self.image is None else png_bytes(self.image)


class Stream:
    """Iterates over what :meth:`~.pipeline.Pipeline.stream` generates; ``result`` is there at the end.

    The pipeline is free between two events, from any thread; other calls cost a copy of this stream's
    caches to host memory and back, and change no image. :meth:`close`, or the end of ``with``, frees
    that copy.
    """

    def __init__(
        self, runtime: Runtime, lock: RequestLock, request: GenerationRequest, partials: int
    ) -> None:
        self.request = request
        self._result: GenerationResult | None = None
        self._runtime, self._lock, self._partials = runtime, lock, partials
        self._seconds = dict.fromkeys(("text", "prefill", "decode", "pixels", "total"), 0.0)
        #: Lets threads that share a stream take its events one after another.
        self._taking = threading.RLock()
        self._events: deque[Progress] = deque()
        self._error: LanternError | None = None
        self._over = False
        self._conditions: Conditions | None = None
        self._slots: Slots[int] | None = None
        self._wanted = list(range(request.count))
        self._shown: dict[int, int] = {}
        self._done: dict[int, tuple[Decoded, Image | None]] = {}

    @property
    def backend(self) -> Backend:
        """The device that generates."""
        return self._runtime.backend

    def __iter__(self) -> Iterator[Progress]:
        return self

    def __next__(self) -> Progress:
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
        """Drop what is not generated yet, and free what is kept of it; from any thread."""
        self._over = True
        self._events.clear()
        self._slots = self._conditions = None

    @property
    def result(self) -> GenerationResult:
        """The images and figures of the whole request; raises RequestError before its last event."""
        if self._result is None or self._events:
            raise RequestError("the stream has not come to its end yet; take its events first")
        return self._result

    def set_aside(self) -> None:
        """Keep the rows while another call uses the engines; of a failure the next event tells."""
        slots = self._slots
        if slots is None:
            return
        try:
            slots.set_aside()
        except Exception as error:
            self._slots = None
            self._error = RequestError(
                "another request took this stream's place, and what it had generated could not be kept "
                f"({why(error)}); stream it again, or take its events without other calls in between"
            )

    def _advance(self) -> None:
        """Generate until there is an event, with the pipeline held."""
        with self._lock.hold(self):
            if self._error is not None:  # it was set aside while this call waited
                return
            try:
                with self._timed("total"):
                    while not (self._events or self._over or self._error):
                        self._turn()
                if len(self._done) == self.request.count and not self._over:
                    self._finish()
            except BaseException:  # an interrupt leaves rows that nobody can trust
                self.close()
                raise

    def _begin(self) -> tuple[Slots[int], Conditions]:
        runtime, request = self._runtime, self.request
        with self._timed("text"):
            conditions = runtime.conditions(request.prompts, request.size, request.negative_prompt)
        asked = request.strategy, request.sampling, conditions, request.count, request.batch_size
        slots = Slots[int](runtime, *asked, request.size)
        self._conditions, self._slots = conditions, slots
        return slots, conditions

    def _turn(self) -> None:
        """Let images join, run some steps, and keep what is new as events."""
        runtime, request = self._runtime, self.request
        slots, conditions = self._slots, self._conditions
        if slots is None or conditions is None:
            slots, conditions = self._begin()
        slots.take_up()
        while self._wanted and slots.joinable:
            with self._timed("prefill"):
                index = self._wanted.pop(0)
                (seed,), (at,) = request.randomness([index])
                slots.join(index, runtime.rows_of(request, conditions, [index]), seed, at)
        with self._timed("decode"):
            slots.advance()
        for index, one in slots.news():
            if isinstance(one, NotFiniteError):
                self._error = one
                return
            self._events.append(self._event(slots, conditions, index, one))

    def _event(
        self, slots: Slots[int], conditions: Conditions, index: int, one: Drawn | int
    ) -> Progress:
        """Return what is known of an image: the complete one, or that of a row."""
        runtime, request = self._runtime, self.request
        image: Image | None = None
        rows = 0
        if isinstance(one, Drawn):
            tokens = one.decoded.tokens[0]
            with self._timed("pixels"):
                made = runtime.pictures_of(request, conditions.shape, [index], one.decoded.tokens)
                image = next(iter(made), None)
            rows = 0 if image is None else image.height
            self._done[index] = one.decoded, image
        else:
            tokens = slots.so_far(one)
            share = len(tokens) * (self._partials + 1) // slots.tokens
            if share > self._shown.get(index, 0):
                image, rows = runtime.partial_picture(tokens, conditions.shape)
                self._shown[index] = share if image else self._shown.get(index, 0)
        return Progress(index, tokens, slots.tokens, image, rows, index in self._done)

    def _finish(self) -> None:
        request, slots = self.request, self._slots
        assert slots is not None
        ordered = [self._done[index] for index in range(request.count)]
        self._result = self._runtime.finished(
            request,
            slots.decision,
            [decoded for decoded, _ in ordered],
            [image for _, image in ordered if image is not None],
            PhaseSeconds(**self._seconds),
            slots.engine.nbytes,
            request.num_images,
        )
        self._over, self._slots, self._conditions = True, None, None

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Let the block infer, and count its seconds for a phase."""
        with inference(self.backend), self.backend.stopwatch() as watch:
            yield
        self._seconds[phase] += watch.seconds
