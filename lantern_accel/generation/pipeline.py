"""Generates images with a loaded model: what ``lantern_accel.load`` returns."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.base import Decoded
from lantern_accel.decoding.buckets import Steps
from lantern_accel.device.backend import Backend, inferring
from lantern_accel.device.entry_points import why
from lantern_accel.device.timeouts import CLOSING, close_in_time, in_time
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DoesNotFitError,
    LanternError,
    RequestError,
    shown,
)
from lantern_accel.families.base import Model, Prompt, Rows
from lantern_accel.generation.engines import CapturedEngine, explained, of_image
from lantern_accel.generation.loaded import Loaded
from lantern_accel.generation.notebook import bar, notebook
from lantern_accel.generation.request import (
    DEFAULT_STRATEGY,
    GenerationRequest,
    RequestLock,
    build_request,
    wanted_images,
)
from lantern_accel.generation.result import GenerationResult, PhaseSeconds, describe
from lantern_accel.generation.settings import takes_settings
from lantern_accel.generation.stream import Stream
from lantern_accel.strategy.values import (
    Sampling,
    Strategy,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CapturedEngine", "Pipeline", "Prompt"]

#: Gets the index of a batch's first image among those that are drawn, and the batch's images.
OnImages = Callable[[int, "list[Image]"], None]


def _told(
    report: Callable[[int, int], None], before: int, images: int, count: int, known: int
) -> None:
    """Report tokens of a request of ``count``, ``known`` by the slowest of a batch's ``images``."""
    report(before + known * images, count)


class Pipeline(Loaded):
    """Generates images; reuses its buffers from call to call. Close it, or use it with ``with``.

    Threads may share a pipeline: its calls run one after another, and a stream's next event is one call.
    What it returns is theirs alone.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        dtype: torch.dtype,
        otherwise: Callable[[BackendError], Pipeline] | None = None,
    ) -> None:
        """``otherwise`` gives the pipeline that serves where this device fails before its first image."""
        super().__init__(model, backend, dtype)
        self._otherwise = otherwise
        self.request_lock = RequestLock(lambda: self.backend)

    def __repr__(self) -> str:
        name, device = self.model.manifest.name, self.backend.device
        return f"<Pipeline {name} on {device}, {str(self.dtype).removeprefix('torch.')}>"

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # else the reason for leaving is what the user must see
                raise

    def close(self) -> None:
        """Release captured steps, buffers and the device; a closed pipeline draws no more.

        What a backend raises here is told in a warning, and so is that it does not return: the images
        are made.
        """
        with self.request_lock.hold(last=True):
            if self.request_lock.closed:
                return
            self.request_lock.closed = True
            if self.backend.unusable:  # what it holds is another process's
                return
            close_in_time(self.backend.name, self._give_back, "what was drawn is kept")

    def _give_back(self) -> None:
        self.engines.release()
        self.backend.close()

    # --- settings ------------------------------------------------------------------------------

    def request(self, prompt: Prompt | Sequence[Prompt], **settings: Any) -> GenerationRequest:
        """Check a request and fill in a preset's or the model's defaults, before any work is done."""
        made = build_request(self.manifest, prompt, settings, self.auto.tuned)
        named = isinstance(settings.get("strategy"), str)
        if named and settings.get("tree") is None and settings.get("window") is None:
            fitted = self.fitted(made.strategy, made.batch_size, made.count, made.sampling)
            made = made.model_copy(update={"strategy": fitted})
        return made

    # --- engines -------------------------------------------------------------------------------

    @inferring
    def warm_up(
        self,
        batches: Sequence[int] = (1,),
        strategies: Sequence[str | Strategy] = (DEFAULT_STRATEGY,),
        on_bucket: Callable[[str, float], None] | None = None,
        **sampling: Any,
    ) -> None:
        """Compile the buckets of these batch sizes and strategies, so that no request waits for it.

        ``sampling`` as :meth:`generate` takes it; ``on_bucket`` gets each bucket's name and seconds. A
        request of another bucket is served with a warning afterwards. Raises RequestError for more
        buckets than are kept.
        """
        if len(batches) * len(strategies) > self.engines.kept:
            raise RequestError(
                f"{len(batches)} batch sizes of {len(strategies)} strategies are more buckets than the "
                f"{self.engines.kept} that are kept; warm up fewer"
            )
        settings = self.sampling(**sampling)
        with self.request_lock.hold():
            self.engines.warmed, self.engines.patience = [], math.inf
            done: list[str] = []
            for batch, given in itertools.product(batches, strategies):
                began = time.perf_counter()
                done.append(self._warm(batch, given, settings))
                if on_bucket is not None:
                    on_bucket(done[-1], time.perf_counter() - began)
            self.engines.warmed = done

    def _warm(self, batch: int, given: str | Strategy, sampling: Sampling) -> str:
        """Make the engine of a batch and rehearse what a request does on it; return the bucket's name."""
        shape = self.model.family.usual_shape(self.model)
        chosen = self.strategy(given)
        if isinstance(given, str):
            chosen = self.auto.tuned(chosen, sampling.temperature)
            chosen = self.fitted(chosen, batch, batch, sampling)
        size = self.engines.padded(batch, chosen, sampling)
        ready = self.engine(size, chosen, sampling, shape)
        engine, state, model = ready.engine, ready.engine.state, self.model
        condition, mask = torch.zeros_like(state.condition), torch.ones_like(state.prefix_mask)
        # A model whose captions come from a file knows none of the examples.
        with contextlib.suppress(LanternError, IndexError):
            example = model.family.examples(model.manifest)[0]
            made = self.conditions([example]).pick([0] * engine.geometry.batch)
            rows = model.family.rows(model, made, sampling)
            if (rows.condition.shape, rows.mask.shape) == (condition.shape, mask.shape):
                condition, mask = rows.condition, rows.mask
        uniforms = engine.randomness(0, [0] * engine.geometry.batch)
        with explained(self.backend):
            decoded = engine.rehearse(condition, mask, uniforms, ready.prefill, ready.step)
            self.pixels(decoded.tokens, shape)
        return f"{chosen.name} x {size}"

    # --- generation ----------------------------------------------------------------------------

    @takes_settings
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_images: OnImages | None = None,
        only: Sequence[int] | None = None,
        **settings: Any,
    ) -> GenerationResult:
        """Generate images for one prompt or a list; see :func:`lantern_accel.generate`.

        ``on_progress`` gets the image tokens known so far and the total (left out, a notebook shows a bar
        with the time that is left), ``on_images`` each batch when
        it is done: the index of its first image among those drawn, and the images. ``only``: indices of
        the images to draw, of those that the request would draw; each is what it would be among all.
        """
        if on_progress is None and (page := notebook()) is not None:
            on_progress = bar(page)
        with self.request_lock.hold():
            while True:
                request = self.request(prompt, **settings)
                try:
                    return self._draw(request, on_progress, on_images, only)
                except (BackendError, RuntimeError) as error:  # torch's own are RuntimeErrors
                    self._move_on(error)
                    settings = {**settings, "seed": request.seeds or request.seed}

    @takes_settings
    def stream(
        self, prompt: Prompt | Sequence[Prompt], *, partials: int = 8, **settings: Any
    ) -> Stream:
        """Return an iterator over the images while they are drawn, row by row.

        ``for progress in pipeline.stream("red heart", seed=7)`` gives :class:`~.stream.Progress` after
        every few steps: tokens so far and, ``partials`` times for each image, a picture of the finished
        rows. The images are those of :meth:`generate`; ``.result`` of the stream has them at the end.

        The loop may be left at any event. Between two of them the pipeline is free for other calls and
        further streams, from any thread; they change no image of this one (:class:`~.stream.Stream`).
        """
        if type(partials) is not int or partials < 0:
            raise RequestError(f"partials cannot be {shown(partials)}; give 0 or more pictures")
        return Stream(self, self.request_lock, self.request(prompt, **settings), partials)

    def _move_on(self, error: BackendError | RuntimeError) -> None:
        """Serve from the next device where ``auto`` chose this one and it has drawn nothing yet."""
        if self._otherwise is None or isinstance(error, DoesNotFitError):
            raise error
        if not isinstance(error, BackendError):
            error = BackendError(f"backend {self.backend.name!r} failed in use: {why(error)}")
        try:
            in_time(self._give_back, CLOSING)
        except Exception as late:  # a device that failed may fail to close; it is left as it is
            error.add_note(f"closing it failed too: {late}")
        other = self._otherwise(error)
        self.model, self.backend, self.dtype = other.model, other.backend, other.dtype
        self.engines, self._otherwise = other.engines, other._otherwise
        self.auto = other.auto

    @inferring
    def _draw(
        self,
        request: GenerationRequest,
        on_progress: Callable[[int, int], None] | None,
        on_images: OnImages | None,
        only: Sequence[int] | None,
    ) -> GenerationResult:
        strategy, sampling = request.strategy, request.sampling
        images: list[Image] = []
        parts: list[Decoded] = []
        spent = dict.fromkeys(("prefill", "decode", "pixels"), 0.0)
        buffers = 0
        used: Strategy | None = None

        def keep(lost: DeviceLostError) -> None:
            lost.images = images

        watch = self.backend.stopwatch
        with explained(self.backend, keep), watch() as total:
            with watch() as text:
                conditions = self.conditions(request.prompts, request.size)
            shape = conditions.shape
            wanted = wanted_images(request, only)
            batch = request.batch_size or self.engines.usual_batch(len(wanted), strategy, sampling)
            batch = min(batch, len(wanted))
            chunks = [wanted[at : at + batch] for at in range(0, len(wanted), batch)]
            sizes = [self.engines.padded(len(chunk), strategy, sampling) for chunk in chunks]
            for size in dict.fromkeys(sizes):
                chosen = self.auto.resolve(strategy, size, sampling)
                self.engines.expect(size, sizes.count(size), chosen, sampling, shape)
            for chunk, size in zip(chunks, sizes, strict=True):
                spare = size - len(chunk)
                full = [*chunk, *[chunk[-1]] * spare]
                picked = conditions.pick([index // request.num_images for index in full])
                rows = self.rows(picked, sampling, request.negative_prompt, request.size)
                ready = self.engine_for(rows, size, strategy, sampling, shape)
                engine = ready.engine
                buffers = max(buffers, engine.nbytes)
                with watch() as prefill:
                    ready.begin(rows, *request.randomness(full))
                    if spare:  # rows that nobody asked for are finished
                        engine.leave_out(len(chunk))
                tokens = engine.geometry.tokens
                part = len(images) * tokens, len(chunk), len(wanted) * tokens
                report = None if on_progress is None else partial(_told, on_progress, *part)
                with watch() as decode, of_image(chunk):
                    done = engine.run(ready.steps, report)
                used = used or self.auto.resolve(strategy, size, sampling)
                self.auto.learn(engine, strategy, size, sampling)
                with watch() as drawing:
                    asked = [request.prompts[index // request.num_images] for index in chunk]
                    seeds = [seed + at for seed, at in zip(*request.randomness(chunk), strict=True)]
                    made = self.pictures(done.tokens, shape, asked, seeds)
                    describe(made, request, chunk[: len(made)], self.model.manifest.name)
                done = Decoded(**{name: value[: len(chunk)] for name, value in vars(done).items()})
                for name, one in (("prefill", prefill), ("decode", decode), ("pixels", drawing)):
                    spent[name] += one.seconds
                if on_images is not None:
                    on_images(len(images), made)
                images += made
                parts.append(done)
                self._otherwise = None  # this device serves
        assert used is not None  # a request has one image at least
        return self.finished(
            request,
            used,
            parts,
            images,
            PhaseSeconds(text=text.seconds, total=total.seconds, **spent),
            batch=batch,
            slots=sizes[0],
            buffers=buffers,
            columns=request.num_images if only is None else 0,
        )

    def _begun(
        self, prompts: Sequence[Prompt], strategy: Strategy, sampling: Sampling
    ) -> tuple[CapturedEngine, Rows]:
        """Return the engine of one batch of prompts, and what its images start from."""
        conditions = self.conditions(prompts)
        self.engines.patience = math.inf  # what is measured is measured with all of its lengths
        rows = self.model.family.rows(self.model, conditions, sampling)
        with explained(self.backend):
            ready = self.engine_for(rows, len(prompts), strategy, sampling, conditions.shape)
        return ready, rows

    @inferring
    def draw_tokens(
        self,
        rows: Rows,
        shape: Hashable,
        strategy: Strategy,
        sampling: Sampling,
        seed: int,
        images: Sequence[int],
        on_progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Decode one batch of rows that were made elsewhere: tokens, int64 ``[B, N]``, on the host.

        ``shape``: that of the conditions that the rows were made of; ``images``: the indices that pick
        each image's randomness; ``on_progress`` gets the tokens known of the slowest image.
        """
        with self.request_lock.hold(), explained(self.backend):
            ready = self.engine_for(rows, len(images), strategy, sampling, shape)
            ready.begin(rows, seed, images)
            return ready.engine.run(ready.steps, on_progress).tokens

    @inferring
    def decode_only(
        self,
        prompts: Sequence[Prompt],
        strategy: Strategy,
        sampling: Sampling,
        seed: int,
        step: Steps | None = None,
        exact_price: bool = False,
    ) -> tuple[Decoded, float]:
        """Decode one batch without pixels; return it and the seconds of prefill and decode.

        ``step`` runs in place of the captured steps (for measurements that look at the state).
        ``exact_price``: price relaxation exactly, on the host's time, in place of a step's bound.
        """
        with self.request_lock.hold():
            ready, rows = self._begun(prompts, strategy, sampling)
            engine = ready.engine
            with explained(self.backend), self.backend.stopwatch() as watch:
                ready.begin(rows, seed, range(len(prompts)))
                engine.accounting = "exact" if exact_price else "bound"
                try:
                    decoded = engine.run(engine.steps if exact_price else step or ready.steps)
                finally:
                    engine.accounting = "bound"
        return decoded, watch.seconds

    @inferring
    def step_times(
        self, prompts: Sequence[Prompt], strategy: Strategy, sampling: Sampling, rounds: int
    ) -> dict[int, list[float]]:
        """Time the steps of every length of a window with several, in turns: milliseconds by length."""
        with self.request_lock.hold():
            ready, rows = self._begun(prompts, strategy, sampling)
            assert isinstance(ready.engine, AdaptiveEngine)
            with explained(self.backend):
                ready.begin(rows, 0, range(len(prompts)))
                return ready.engine.calibrate(self.backend.stopwatch, rounds=rounds)
