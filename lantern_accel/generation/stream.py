"""Images while they are drawn: ``for event in pipeline.stream(...)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lantern_accel.decoding.engine import Decoded
from lantern_accel.device.backend import inferring
from lantern_accel.errors import RequestError
from lantern_accel.generation.result import GenerationResult, PhaseSeconds, png_bytes
from lantern_accel.generation.slots import Slots

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.families.base import Conditions
    from lantern_accel.generation.loaded import Loaded
    from lantern_accel.generation.request import GenerationRequest
    from lantern_accel.generation.request_lock import RequestLock


@dataclass(frozen=True)
class Progress:
    """What is known of one image of a request.

    ``index`` of the image; ``tokens`` int64 ``[known]``, on the host, of ``total``; ``image``: a picture
    of the finished rows, None where no new row is finished; ``rows``: pixel rows of it that are decided;
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
        """Return the picture for notebooks."""
        return None if self.image is None else png_bytes(self.image)


class Stream:
    """Iterates over what :meth:`~.pipeline.Pipeline.stream` draws; ``result`` is there at the end.

    The device is held until the last event, or until :meth:`close`; a loop that is left early should
    close the stream, or be within ``with``.
    """

    def __init__(
        self,
        pipeline: Loaded,
        lock: RequestLock,
        request: GenerationRequest,
        partials: int,
    ) -> None:
        self.request = request
        self._result: GenerationResult | None = None
        self._pipeline, self._lock, self._partials = pipeline, lock, partials
        self.backend = pipeline.backend
        self._seconds = dict.fromkeys(("text", "prefill", "decode", "pixels"), 0.0)
        self._events = self._run()

    def __iter__(self) -> Iterator[Progress]:
        return self._events

    def __next__(self) -> Progress:
        return next(self._events)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is not drawn yet, and let the pipeline serve others."""
        self._events.close()  # type: ignore[attr-defined]

    @property
    def result(self) -> GenerationResult:
        """The images and figures of the whole request; raises RequestError before its last event."""
        if self._result is None:
            raise RequestError("the stream has not come to its end yet; take its events first")
        return self._result

    def _run(self) -> Iterator[Progress]:
        pipeline, request = self._pipeline, self.request
        # The lock is held between events, the device's inference mode is not: it is the thread's.
        with self._lock.hold(), pipeline.backend.stopwatch() as total:
            conditions = self._conditions()
            wanted = list(range(request.count))
            slots = self._open(conditions)
            at: dict[int, int] = {}
            shown: dict[int, int] = {}
            done: dict[int, tuple[Decoded, Image | None]] = {}
            while len(done) < request.count:
                while wanted and slots.joinable:
                    row = self._join(slots, conditions, wanted[0])
                    at[row] = wanted.pop(0)
                with self._timed("decode"):
                    slots.advance()
                for row in slots.unsound:
                    del at[row]
                    error = slots.leave(row)
                    assert error is not None
                    raise error
                for row in slots.complete:
                    drawn, index = slots.take(row).decoded, at.pop(row)
                    image = self._pixels(drawn, conditions, index)
                    done[index] = drawn, image
                    height = 0 if image is None else image.height
                    yield Progress(index, drawn.tokens[0], slots.tokens, image, height, True)
                for row, index in at.items():
                    known = slots.known(row)
                    share = known * (self._partials + 1) // slots.tokens
                    image_, rows = None, 0
                    if share > shown.get(index, 0):
                        made = pipeline.partial_picture(slots.so_far(row), conditions.shape)
                        if made is not None:
                            shown[index] = share
                            image_, rows = made
                    yield Progress(index, slots.so_far(row), slots.tokens, image_, rows, False)
        self._finish(slots, done, total.seconds)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count the block's seconds for a phase."""
        with self.backend.stopwatch() as watch:
            yield
        self._seconds[phase] += watch.seconds

    @inferring
    def _conditions(self) -> Conditions:
        with self._timed("text"):
            return self._pipeline.conditions(self.request.prompts, self.request.size)

    def _open(self, conditions: Conditions) -> Slots:
        pipeline, request = self._pipeline, self.request
        batch = request.batch_size or pipeline.engines.usual_batch(
            request.count, request.strategy, request.sampling
        )
        size = min(batch, request.count)
        return Slots(pipeline, request.strategy, request.sampling, size, conditions.pick([0]))

    @inferring
    def _join(self, slots: Slots, conditions: Conditions, index: int) -> int:
        model, request = self._pipeline.model, self.request
        with self._timed("prefill"):
            picked = conditions.pick([index // request.num_images])
            rows = model.family.rows(model, picked, request.sampling)
            return slots.join(rows, request.seed, index)

    @inferring
    def _pixels(self, drawn: Decoded, conditions: Conditions, index: int) -> Image | None:
        request = self.request
        with self._timed("pixels"):
            prompt = request.prompts[index // request.num_images]
            made = self._pipeline.pictures(
                drawn.tokens, conditions.shape, [prompt], [request.seed + index]
            )
            return next(iter(made), None)

    def _finish(self, slots: Slots, done: dict[int, tuple[Decoded, Any]], total: float) -> None:
        ordered = [done[index] for index in range(self.request.count)]
        self._result = self._pipeline.finished(
            self.request,
            slots.strategy,
            [decoded for decoded, _ in ordered],
            [image for _, image in ordered if image is not None],
            PhaseSeconds(total=total, **self._seconds),
            batch=slots.size,
            slots=slots.size,
            buffers=slots.engine.nbytes,
            columns=self.request.num_images,
        )
