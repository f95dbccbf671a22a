"""Images while they are drawn: ``for event in pipeline.stream(...)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lantern_accel.decoding.base import Decoded
from lantern_accel.errors import NotFiniteError, RequestError
from lantern_accel.generation.result import GenerationResult, PhaseSeconds, png_bytes
from lantern_accel.generation.slots import Drawn, Slots

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.generation.loaded import Loaded
    from lantern_accel.generation.request import GenerationRequest, RequestLock


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
        pipeline, request, model = self._pipeline, self.request, self._pipeline.model
        # The lock is held between events, the device's inference mode is not: it is the thread's.
        with self._lock.hold(), pipeline.backend.stopwatch() as total:
            with self._timed("text"):
                conditions = pipeline.conditions(request.prompts, request.size)
            wanted = list(range(request.count))
            asked = request.strategy, request.sampling
            size = request.batch_size or pipeline.engines.usual_batch(request.count, *asked)
            first = conditions.pick([0])
            slots = Slots[int](pipeline, *asked, min(size, request.count), first)
            shown: dict[int, int] = {}
            done: dict[int, tuple[Decoded, Image | None]] = {}
            while len(done) < request.count:
                while wanted and slots.joinable:
                    with self._timed("prefill"):
                        index = wanted.pop(0)
                        picked = conditions.pick([index // request.num_images])
                        rows_ = model.family.rows(model, picked, request.sampling)
                        slots.join(index, rows_, request.seed, index)
                with self._timed("decode"):
                    slots.advance()
                for index, one in slots.news():
                    if isinstance(one, NotFiniteError):
                        raise one
                    if isinstance(one, Drawn):
                        drawn, tokens = one.decoded, one.decoded.tokens[0]
                        prompt = request.prompts[index // request.num_images]
                        with self._timed("pixels"):
                            of = conditions.shape, [prompt], [request.seed + index]
                            image = next(iter(pipeline.pictures(drawn.tokens, *of)), None)
                        rows = 0 if image is None else image.height
                        done[index] = drawn, image
                    else:
                        tokens, image, rows = slots.so_far(one), None, 0
                        share = len(tokens) * (self._partials + 1) // slots.tokens
                        if share > shown.get(index, 0):
                            image, rows = pipeline.partial_picture(tokens, conditions.shape)
                            shown[index] = share if image else shown.get(index, 0)
                    yield Progress(index, tokens, slots.tokens, image, rows, index in done)
        ordered = [done[index] for index in range(request.count)]
        self._result = pipeline.finished(
            request,
            slots.strategy,
            [decoded for decoded, _ in ordered],
            [image for _, image in ordered if image is not None],
            PhaseSeconds(total=total.seconds, **self._seconds),
            batch=slots.size,
            slots=slots.size,
            buffers=slots.engine.nbytes,
            columns=request.num_images,
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Let the block infer, and count its seconds for a phase."""
        with self.backend.inference(), self.backend.stopwatch() as watch:
            yield
        self._seconds[phase] += watch.seconds
