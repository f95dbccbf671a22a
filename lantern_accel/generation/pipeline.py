"""Generates images with a loaded model: what ``lantern_accel.load`` returns."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.session import Observer
from lantern_accel.device.backend import Backend
from lantern_accel.device.context import inferring
from lantern_accel.device.entry_points import why
from lantern_accel.device.timeouts import CLOSING, close_in_time, in_time
from lantern_accel.errors import BackendError, DoesNotFitError, LanternError, RequestError, shown
from lantern_accel.families.base import Conditions, Model, Prompt, Rows, Size
from lantern_accel.families.manifest import Manifest
from lantern_accel.files import check_target
from lantern_accel.generation.batch import Batch, ImageJob, Phases, filled, jobs_of
from lantern_accel.generation.calibrate import calibrate
from lantern_accel.generation.decision import BatchPlan, Decision
from lantern_accel.generation.engines import CapturedEngine, explained, of_image
from lantern_accel.generation.notebook import notebook_bar
from lantern_accel.generation.request import (
    GenerationRequest,
    RequestLock,
    build_request,
    passing,
    wanted_images,
)
from lantern_accel.generation.result import GenerationResult, PhaseSeconds
from lantern_accel.generation.runtime import Runtime
from lantern_accel.generation.settings import read_settings, takes_settings
from lantern_accel.generation.stream import Stream
from lantern_accel.generation.unfinished import Unfinished
from lantern_accel.strategy.choose import choose_strategy
from lantern_accel.strategy.rules import validated
from lantern_accel.strategy.sampling import named_once
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CapturedEngine", "Pipeline", "Prompt"]

#: Gets the index of a batch's first image among those generated, and the batch's images.
OnImages = Callable[[int, "list[Image]"], None]


class Pipeline:
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
        self._use(Runtime(model, backend, dtype), otherwise)
        self.request_lock = RequestLock(lambda: self.backend)

    def _use(self, runtime: Runtime, otherwise: Callable[[BackendError], Pipeline] | None) -> None:
        """Serve by what is loaded: the model, the device, its engines, and what auto knows of it."""
        self.runtime, self._otherwise = runtime, otherwise
        self.model, self.backend, self.dtype = runtime.model, runtime.backend, runtime.dtype
        self.engines, self.measurements = runtime.engines, runtime.measurements

    def __repr__(self) -> str:
        name, device = self.model.manifest.name, self.backend.device
        return f"<Pipeline {name} on {device}, {str(self.dtype).removeprefix('torch.')}>"

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # else the reason for leaving is what the user must see
                raise

    def close(self) -> None:
        """Release captured steps, buffers and the device; a closed pipeline generates no more."""
        with self.request_lock.hold(last=True):
            if self.request_lock.closed:
                return
            self.request_lock.closed = True
            if self.backend.unusable:  # what it holds is another process's
                return
            close_in_time(self.backend.name, self._give_back, "what was generated is kept")

    def _give_back(self) -> None:
        self.engines.release()
        self.backend.close()

    # --- what is loaded ------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """The model's manifest, with the default trees that this device's costs favour."""
        return self.measurements.manifest

    def conditions(self, prompts: Sequence[Prompt], size: Size | None = None) -> Conditions:
        """Return what the prompts become before decoding, one condition per prompt."""
        return self.runtime.conditions(prompts, size)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise :class:`RequestError` for a prompt that this model cannot generate."""
        self.conditions(prompts)

    def pixels(self, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode tokens, int64 ``[n, tokens]``, to uint8 ``[n, H, W, 3]`` on the host (float32 VQ)."""
        return self.runtime.pixels(tokens, shape).clone()  # no tensor of inference mode

    # --- settings ------------------------------------------------------------------------------

    def strategy(
        self,
        strategy: str | Strategy = AUTO,
        *,
        tuned_for: tuple[int, Sampling] | None = None,
        **changes: Any,
    ) -> Strategy:
        """Return a strategy by name, with this model's defaults, and changes applied.

        A tree that nobody chose has no more nodes than the device's costs favour. ``tuned_for``: rows
        and sampling for which drafts that nobody chose are the best known here.

        ``changes``: ``tree`` (a tree, or text as ``--tree`` takes it), ``accept``, ``k``, ``delta``,
        ``lam``, ``residual``, ``neighbour_space``; None leaves the default.
        """
        made = choose_strategy(self.manifest.defaults, strategy, **changes)
        own = isinstance(strategy, Strategy) or changes.get("tree") or changes.get("window")
        if tuned_for is None or own:
            return made
        return self.measurements.tuned(made, *tuned_for)

    def sampling(self, **overrides: Any) -> Sampling:
        """Return this model's sampling settings with overrides (None leaves the default)."""
        values = self.model.manifest.defaults.sampling.model_dump()
        values.update({k: v for k, v in named_once(overrides).items() if v is not None})
        return validated(Sampling, values, "sampling")

    def request(self, prompt: Prompt | Sequence[Prompt], **settings: Any) -> GenerationRequest:
        """Check a request and fill in a preset's or the model's defaults, before any work is done."""
        return build_request(self.manifest, prompt, settings, self._tuned)

    def _tuned(
        self, strategy: Strategy, batch: int | None, count: int, sampling: Sampling
    ) -> Strategy:
        rows = 1
        if strategy.drafts.device_sets == "length":  # nothing else depends on the rows
            rows = max(self.engines.capacity.batches(count, batch, strategy, sampling).values())
        return self.measurements.tuned(strategy, rows, sampling)

    # --- engines -------------------------------------------------------------------------------

    def release_engines(self) -> None:
        """Free the buffers and captured steps that are kept for the next call."""
        self.engines.release()

    @inferring
    def engine(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> CapturedEngine:
        """Return the engine of these settings with its captured functions, made on first use.

        ``auto`` stands for what is known of this batch. ``shape``: that of the conditions it will start
        from, where a model's are not all alike.
        """
        used = self.measurements.resolve(strategy, batch, sampling)
        return self.engines.get(batch, used, sampling, shape)

    @inferring
    def warm_up(
        self,
        batches: int | Sequence[int] = (1,),
        strategies: str | Strategy | Sequence[str | Strategy] = (AUTO,),
        on_bucket: Callable[[str, float], None] | None = None,
        **sampling: Any,
    ) -> None:
        """Compile the buckets of these batch sizes and strategies, so that no request waits for it.

        One of either needs no list. ``sampling`` as :meth:`generate` takes it; ``on_bucket`` gets each
        bucket's name and seconds. A request of another bucket is served with a warning afterwards.
        Raises RequestError for more buckets than are kept.
        """
        given: Any = batches  # text, too, by mistake
        given = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        batches = [read_settings({"batch_size": one}).batch_size or 1 for one in given]
        strategies = [strategies] if isinstance(strategies, str | Strategy) else [*strategies]
        if len(batches) * len(strategies) > self.engines.kept:
            raise RequestError(
                f"{len(batches)} batch sizes of {len(strategies)} strategies are more buckets than the "
                f"{self.engines.kept} that are kept; warm up fewer"
            )
        settings = self.sampling(**sampling)
        with self.request_lock.hold():
            self.engines.warmed = []
            done: list[str] = []
            for batch, strategy in itertools.product(batches, strategies):
                began = time.perf_counter()
                done.append(self._warm(batch, strategy, settings))
                if on_bucket is not None:
                    on_bucket(done[-1], time.perf_counter() - began)
            self.engines.warmed = done

    def _warm(self, batch: int, given: str | Strategy, sampling: Sampling) -> str:
        """Make the engine of a batch and rehearse what a request does on it; return the bucket's name."""
        shape = self.model.family.usual_shape(self.model)
        chosen = self.strategy(given)
        size = self.engines.capacity.batches(batch, batch, chosen, sampling, shape)[batch]
        chosen = self.strategy(given, tuned_for=(size, sampling))
        used = self.measurements.resolve(chosen, size, sampling)
        part = BatchPlan(images=size, rows=size, strategy=used, memory=0, free=None)
        made = Batch[ImageJob](self.runtime, part, sampling, shape)
        state, model = made.engine.state, self.model
        start = Rows(torch.zeros_like(state.condition), torch.ones_like(state.prefix_mask))
        # A model whose captions come from a file knows none of the examples.
        with contextlib.suppress(LanternError, IndexError):
            example = model.family.examples(model.manifest)[0]
            known = self.conditions([example]).pick([0] * size)
            rows = model.family.rows(model, known, sampling)
            if (rows.condition.shape, rows.mask.shape) == (start.condition.shape, start.mask.shape):
                start = rows
        made.begin([ImageJob(index, "", 0, 0) for index in range(size)], start)
        made.engine.leave_out(0)
        self.pixels(made.run().decoded.tokens, shape)
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
        decision: Decision | None = None,
        unfinished: Path | None = None,
        **settings: Any,
    ) -> GenerationResult:
        """Generate images for one prompt or a list; see :func:`lantern_accel.generate`.

        ``on_progress`` gets the image tokens known so far and the total, before each step (left out, a
        notebook shows a bar with the time that is left), ``on_images`` each batch when it is done: the
        index of its first image among those generated, and the images. What either raises ends the call:
        a flag that ``on_progress`` checks stops it after the step that runs. ``only``: indices of the
        images to generate, of those that the request would generate; each is what it would be among all.
        ``decision``: an earlier result's ``stats.decision``, to decode with that; raises RequestError
        where it was made for something else. ``unfinished``: a file for the tokens so far, every ten
        seconds and at an interrupt, from which the same call with the same seed goes on: with the same
        tokens where the seed decides them all. It is deleted at the end.
        """
        given: object = decision
        if not isinstance(given, Decision | None):
            text = f"{shown(decision)} is not a decision; give an earlier result's stats.decision"
            raise RequestError(text, field="decision")
        if decision is not None and settings.get("strategy") is None:
            settings["strategy"] = decision.strategy
        if not isinstance(unfinished, str | Path | None):
            raise RequestError(f"{shown(unfinished)} is not a file's path", field="unfinished")
        if unfinished is not None:
            check_target(unfinished := Path(unfinished))
        on_progress, on_images = passing(on_progress or notebook_bar()), passing(on_images)
        with self.request_lock.hold():
            while True:
                request = self.request(prompt, **settings)
                try:
                    return self._generate(
                        request, on_progress, on_images, only, decision, unfinished
                    )
                except (BackendError, RuntimeError) as error:  # torch's own are RuntimeErrors
                    self._move_on(error)
                    settings = {**settings, "seed": request.seeds or request.seed}

    @takes_settings
    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        partials: int = 8,
        on_step: Callable[[], None] | None = None,
        **settings: Any,
    ) -> Stream:
        """Return an iterator over the images while they are generated, row by row.

        ``for progress in pipeline.stream("red heart", seed=7)`` gives :class:`~.stream.Progress` after
        every few steps: tokens so far and, ``partials`` times for each image, a partial image of
        the finished rows. The images are those of :meth:`generate`; ``.result`` of the stream has
        them at the end. ``on_step`` is called before each prompt and each step; what it raises ends it.

        The loop may be left at any event. Between two of them the pipeline is free for other calls and
        further streams, from any thread; they change no image of this one (:class:`~.stream.Stream`).
        """
        if type(partials) is not int or partials < 0:
            raise RequestError(f"partials cannot be {shown(partials)}; give 0 or more images")
        request = self.request(prompt, **settings)
        return Stream(self.runtime, self.request_lock, request, partials, passing(on_step))

    def _move_on(self, error: BackendError | RuntimeError) -> None:
        """Serve from the next device where ``auto`` chose this one and it has generated nothing yet."""
        if self._otherwise is None or isinstance(error, DoesNotFitError):
            raise error
        if not isinstance(error, BackendError):
            error = BackendError(f"backend {self.backend.name!r} failed in use: {why(error)}")
        try:
            in_time(self._give_back, CLOSING)
        except Exception as late:  # a device that failed may fail to close; it is left as it is
            error.add_note(f"closing it failed too: {late}")
        other = self._otherwise(error)
        self._use(other.runtime, other._otherwise)

    @inferring
    def _generate(
        self,
        request: GenerationRequest,
        on_progress: Callable[[int, int], None] | None,
        on_images: OnImages | None,
        only: Sequence[int] | None,
        given: Decision | None,
        path: Path | None = None,
    ) -> GenerationResult:
        """Generate a request's images, batch by batch."""
        runtime, phases = self.runtime, Phases(self.backend.stopwatch)
        images: list[Image] = []
        parts: list[Decoded] = []
        wanted, before = wanted_images(request, only), self.measurements.seconds
        buffers = resumed = 0
        name = f"{self.model.weights_hash} {self.dtype}"
        file = None if path is None else Unfinished(path, name, request)
        with explained(self.backend, images), self.backend.stopwatch() as total:
            with phases.timed("text"):
                made = runtime.conditions(request.prompts, request.size, request.negative_prompt)
            if given is not None:
                given.check(runtime.place, request)
            decision = given or runtime.decide(
                request.strategy, request.sampling, made.shape,
                lambda count: runtime.rows_of(request, made, filled(wanted, count)),
                len(wanted), request.batch_size, request.size,
            )  # fmt: skip
            measuring = self.measurements.seconds - before
            chunks = [*decision.chunks(wanted)]
            counts = Counter(part.images for part, _ in chunks)

            def paint(decoded: Decoded, drawn: Sequence[ImageJob]) -> list[Image]:
                indices = [one.index for one in drawn]
                return runtime.pictures_of(request, made.shape, indices, decoded, decision, part)

            for part, chunk in chunks:
                rows, known = filled(chunk, part.rows), None
                exact = request.sampling.greedy and not part.strategy.acceptance.relaxed
                if file is not None and (part.strategy.invariant or exact):
                    known = file.known(rows)
                if known is not None and part.strategy.drafts.needs_drafter:
                    # Its drafter has not read these tokens.
                    part = part.model_copy(update={"strategy": self.strategy("vanilla")})
                batch = Batch(runtime, part, request.sampling, made.shape, paint, phases)
                if announced := counts.pop(part.images, 0):
                    batch.ready.expect(announced)
                buffers = max(buffers, batch.engine.nbytes)
                first, tokens = runtime.rows_of(request, made, rows), batch.tokens
                watched = on_progress is not None or file is not None
                batch.begin(jobs_of(request, chunk), first, known, watched=watched)
                resumed += 0 if known is None else (known.shape[1] - 1) * len(chunk)
                before_it, whole = len(images) * tokens, len(wanted) * tokens
                report = partial(_report, batch, file, on_progress, before_it, whole)
                try:
                    with of_image(chunk):
                        done = batch.run(report if watched else None)
                    report()
                    if on_images is not None:
                        on_images(len(images), done.pictures)
                except BaseException:  # Ctrl-C and a lost device too: what is drawn is kept
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        if file is not None:
                            file.write(batch.snapshot())
                    raise
                images.extend(done.pictures)
                parts.append(done.decoded)
                self._otherwise = None  # this device serves
        seconds = PhaseSeconds(total=total.seconds, measuring=measuring, **phases.seconds)
        columns = request.num_images if only is None else 0
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        return runtime.finished(
            request, decision, parts, images, seconds, buffers, columns, resumed
        )

    # --- parts of a request, for measurements, training and other libraries --------------------

    @contextlib.contextmanager
    def _begun(
        self,
        made: Callable[[], tuple[Rows, Hashable]],
        seeds: Sequence[tuple[int, int]],
        strategy: Strategy,
        sampling: Sampling,
        observer: Observer | None = None,
        **how: Any,
    ) -> Iterator[Batch[ImageJob]]:
        """Give a batch whose images have begun and leave tokens, with the device to itself.

        Steps of auto are timed on the rows if need be. ``seeds``: of each image its seed and number;
        ``how``: as :meth:`~.Batch.begin` takes it.
        """
        with self.request_lock.hold(), explained(self.backend):
            rows, shape = made()
            asked = strategy, sampling, shape, lambda count: rows
            (part,) = self.runtime.decide(*asked, len(seeds), len(seeds), joins=True).parts
            batch = Batch[ImageJob](self.runtime, part, sampling, shape)
            batch.engine.session.observer = observer
            try:
                jobs = [ImageJob(index, "", *seed) for index, seed in enumerate(seeds)]
                batch.begin(jobs, rows, **how)
                yield batch
            finally:
                batch.engine.session.observer = None

    @inferring
    def decode_rows(
        self,
        made: Callable[[], tuple[Rows, Hashable]],
        strategy: Strategy,
        sampling: Sampling,
        seeds: Sequence[tuple[int, int]],
        *,
        step: Callable[[], None] | None = None,
        on_progress: Callable[[int], None] | None = None,
        observer: Observer | None = None,
    ) -> tuple[Decoded, float]:
        """Decode one batch of rows without pixels; return it and the seconds of prefill and decode.

        ``made`` returns the rows, and the shape of the conditions that they were made of; ``seeds``: of
        each image its seed and its number, which pick its randomness; ``on_progress`` gets the tokens
        that are known of the slowest image, before each step. ``step`` runs in place of the captured
        steps (for measurements that look at the state). ``observer`` sees every step judged, operator
        by operator (:attr:`.Session.observer`).
        """
        told = passing(on_progress)
        how = {"step": step, "watched": told is not None}
        with self._begun(made, seeds, strategy, sampling, observer, **how) as batch:
            done = batch.run(told and (lambda: told(batch.known)))
            if told is not None:
                told(batch.known)
        return done.decoded, batch.phases.seconds["prefill"] + batch.phases.seconds["decode"]

    def _rows(self, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[Rows, Hashable]:
        """Return what the images of prompts start from, and their shape."""
        conditions = self.conditions(prompts)
        return self.model.family.rows(self.model, conditions, sampling), conditions.shape

    def decode_only(
        self,
        prompts: Sequence[Prompt],
        strategy: Strategy,
        sampling: Sampling,
        seed: int,
        step: Callable[[], None] | None = None,
        observer: Observer | None = None,
    ) -> tuple[Decoded, float]:
        """Decode one batch of prompts without pixels, as :meth:`decode_rows` does."""
        made = partial(self._rows, prompts, sampling)
        seeds = [(seed, i) for i in range(len(prompts))]
        return self.decode_rows(made, strategy, sampling, seeds, step=step, observer=observer)

    @inferring
    def step_times(
        self, prompts: Sequence[Prompt], strategy: Strategy, sampling: Sampling, rounds: int
    ) -> dict[int, list[float]]:
        """Time the steps of every length of a window with several, in turns: milliseconds by length."""
        made = partial(self._rows, prompts, sampling)
        with self._begun(made, [(0, i) for i in range(len(prompts))], strategy, sampling) as batch:
            return calibrate(batch.engine, self.backend.stopwatch, rounds=rounds)


def _report(
    batch: Batch[ImageJob],
    file: Unfinished | None,
    on_progress: Callable[[int, int], None] | None,
    before: int,
    whole: int,
) -> None:
    """Tell a caller the tokens so far, ``before`` the batch and in it, of the ``whole``; note them."""
    if on_progress is not None:
        on_progress(before + batch.known * len(batch.images), whole)
    if file is not None:
        file.note(batch.snapshot)
