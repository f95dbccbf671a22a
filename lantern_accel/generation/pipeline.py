"""The pipeline that ``lantern_accel.load`` returns: it generates images with a loaded model."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
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
from lantern_accel.errors import BackendError, DoesNotFitError, LanternError, RequestError, show
from lantern_accel.families.base import Conditions, Model, Prompt, Rows, Size
from lantern_accel.families.manifest import Manifest
from lantern_accel.files import check_target
from lantern_accel.generation.batch import Batch, Phases, fill_rows
from lantern_accel.generation.calibrate import calibrate
from lantern_accel.generation.decision import BatchPlan, Decision
from lantern_accel.generation.engines import CapturedEngine, explain_errors
from lantern_accel.generation.notebook import notebook_bar
from lantern_accel.generation.request import (
    GenerationRequest,
    ImageJob,
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
from lantern_accel.strategy.rules import validate_model
from lantern_accel.strategy.sampling import named_once
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CapturedEngine", "Pipeline", "Prompt"]

#: Gets the index of a batch's first image among those generated, and the batch's images.
OnImages = Callable[[int, "list[Image]"], None]


class Pipeline:
    """Generates images, and reuses its buffers between calls. Close it, or use it with ``with``.

    Threads may share a pipeline. Its calls run one after another, and each event of a stream is one call.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        dtype: torch.dtype,
        otherwise: Callable[[BackendError], Pipeline] | None = None,
    ) -> None:
        """``otherwise`` returns the next device's pipeline if this one fails before its first image."""
        self._use(Runtime(model, backend, dtype), otherwise)
        self.request_lock = RequestLock(lambda: self.backend)

    def _use(self, runtime: Runtime, otherwise: Callable[[BackendError], Pipeline] | None) -> None:
        """Use a runtime: a loaded model, its device, engines and measurements."""
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
        """Release captured steps, buffers and the device. A closed pipeline cannot generate."""
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
        """The model's manifest, with the default trees that are fastest on this device."""
        return self.measurements.manifest

    def conditions(self, prompts: Sequence[Prompt], size: Size | None = None) -> Conditions:
        """Encode prompts: return one condition per prompt."""
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
        """Return a strategy by name, with this model's defaults and the given changes.

        A default tree has the node count that is fastest on the device. ``tuned_for``: the rows and the
        sampling that default drafts are tuned for.

        ``changes``: ``drafts`` (a source, or its text), ``accept``, ``k``, ``delta``, ``lam``,
        ``residual``, ``neighbour_space``. None keeps the default.
        """
        made = choose_strategy(self.manifest.defaults, strategy, **changes)
        own = isinstance(strategy, Strategy) or changes.get("drafts") or changes.get("window")
        if tuned_for is None or own:
            return made
        return self.measurements.tune_strategy(made, *tuned_for)

    def sampling(self, **overrides: object) -> Sampling:
        """Return this model's sampling settings with overrides (None leaves the default)."""
        values = self.model.manifest.defaults.sampling.model_dump()
        values.update({k: v for k, v in named_once(overrides).items() if v is not None})
        return validate_model(Sampling, values, "sampling")

    def request(self, prompt: Prompt | Sequence[Prompt], **settings: object) -> GenerationRequest:
        """Check a request, and fill in the defaults of the preset or the model. Nothing is decoded."""
        return build_request(self.manifest, prompt, settings, self._tune)

    def _tune(
        self, strategy: Strategy, batch: int | None, count: int, sampling: Sampling
    ) -> Strategy:
        rows = 1
        if strategy.drafts.device_sets == "length":  # nothing else depends on the rows
            rows = max(self.engines.capacity.batches(count, batch, strategy, sampling).values())
        return self.measurements.tune_strategy(strategy, rows, sampling)

    # --- engines -------------------------------------------------------------------------------

    def release_engines(self) -> None:
        """Free the buffers and captured steps that are kept for the next call."""
        self.engines.release()

    @inferring
    def engine(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> CapturedEngine:
        """Return the engine of these settings with its captured functions, made on first use.

        ``auto`` stands for what is known of this batch. ``shape``: of the conditions that it will start
        from, where a model's are not all alike.
        """
        strategy = self.measurements.resolve(strategy, batch, sampling)
        return self.engines.get(batch, strategy, sampling, shape)

    @inferring
    def warm_up(
        self,
        batches: int | Sequence[int] = (1,),
        strategies: str | Strategy | Sequence[str | Strategy] = (AUTO,),
        on_bucket: Callable[[str, float], None] | None = None,
        **sampling: object,
    ) -> None:
        """Compile the steps of these batch sizes and strategies, so that no request waits for it.

        A single value needs no list. ``sampling``: settings as in :meth:`generate`. ``on_bucket`` gets
        each bucket's name and seconds. Later requests of other buckets cause a warning. Raises
        RequestError for more buckets than are kept.
        """
        given: object = batches  # text, too, by mistake
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
        """Build the engine of a batch and decode once with it; return the bucket's name."""
        shape = self.model.family.usual_shape(self.model)
        asked = self.strategy(given)
        size = self.engines.capacity.batches(batch, batch, asked, sampling, shape)[batch]
        asked = self.strategy(given, tuned_for=(size, sampling))
        strategy = self.measurements.resolve(asked, size, sampling)
        part = BatchPlan(images=size, rows=size, strategy=strategy, memory=0, free=None)
        made = Batch[ImageJob](self.runtime, part, sampling, shape)
        state, model = made.engine.state, self.model
        start = Rows(torch.zeros_like(state.condition), torch.ones_like(state.prefix_mask))
        # A model whose captions come from a file knows none of the examples.
        with contextlib.suppress(LanternError, IndexError):
            known = self.conditions([model.family.examples(self.manifest)[0]]).pick([0] * size)
            rows = model.family.rows(model, known, sampling)
            if (rows.condition.shape, rows.mask.shape) == (start.condition.shape, start.mask.shape):
                start = rows
        made.begin([ImageJob(index, "", 0, 0) for index in range(size)], start)
        made.engine.leave_out(0)
        self.pixels(made.run().decoded.tokens, shape)
        return f"{asked.name} x {size}"

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
        **settings: object,
    ) -> GenerationResult:
        """Generate images for one prompt or a list; see :func:`lantern_accel.generate`.

        ``on_progress`` gets the committed image tokens and the total before each step. Without it a
        notebook shows a progress bar. ``on_images`` gets each finished batch: the index of its first
        image, and the images. An exception from either ends the call. ``only``: indices of the images to
        generate, which do not depend on the others. ``decision``: an earlier result's ``stats.decision``,
        to decode in the same way; raises RequestError if it does not fit the request. ``unfinished``: a
        file that gets the tokens so far, every ten seconds and at an interrupt. The same call with the
        same seed continues from it, and gives the same images if the coupling is invariant. The file is
        deleted at the end.
        """
        given: object = decision
        if not isinstance(given, Decision | None):
            text = f"{show(decision)} is not a decision; give an earlier result's stats.decision"
            raise RequestError(text, field="decision")
        if decision is not None and settings.get("strategy") is None:
            settings["strategy"] = decision.strategy
        if not isinstance(unfinished, str | Path | None):
            raise RequestError(f"{show(unfinished)} is not a file's path", field="unfinished")
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
        **settings: object,
    ) -> Stream:
        """Return an iterator over events while images are generated.

        ``for progress in pipeline.stream("red heart", seed=7)`` yields a :class:`~.stream.ImageProgress`
        every few steps. It has the tokens so far and, ``partials`` times per image, a partial image of
        the finished rows. The images equal those of :meth:`generate`, and the stream's ``.result`` has
        them at the end. ``on_step`` is called before each prompt and each step; what it raises ends it.

        The loop may stop at any event. Between events, any thread may call the pipeline or start further
        streams. This does not change the stream's images (:class:`~.stream.Stream`).
        """
        if type(partials) is not int or partials < 0:
            raise RequestError(f"partials cannot be {show(partials)}; give 0 or more images")
        request = self.request(prompt, **settings)
        return Stream(self.runtime, self.request_lock, request, partials, passing(on_step))

    def _move_on(self, error: BackendError | RuntimeError) -> None:
        """Use the next device if ``auto`` chose this one and it has not generated anything yet."""
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
        with explain_errors(self.backend, images), self.backend.stopwatch() as total:
            with phases.count_seconds("text"):
                made = runtime.conditions(request.prompts, request.size, request.negative_prompt)
            if given is not None:
                given.check(runtime.place, request)
            decision = given or runtime.decide(
                request.strategy, request.sampling, made.shape,
                lambda count: runtime.rows_of(request, made, fill_rows(wanted, count)),
                len(wanted), request.batch_size, request.size,
            )  # fmt: skip
            measuring = self.measurements.seconds - before
            chunks = [*decision.chunks(wanted)]
            counts = Counter(part.images for part, _ in chunks)
            for part, chunk in chunks:
                rows, known = fill_rows(chunk, part.rows), None
                exact = request.sampling.greedy and not part.strategy.acceptance.relaxed
                if file is not None and (part.strategy.invariant or exact):
                    known = file.first_tokens(rows)
                if known is not None and part.strategy.drafts.needs_drafter:
                    # Its drafter has not read these tokens.
                    part = part.model_copy(update={"strategy": self.strategy("vanilla")})
                make_images = partial(runtime.images_of, request, made.shape, decision, part)
                batch = Batch(runtime, part, request.sampling, made.shape, make_images, phases)
                if announced := counts.pop(part.images, 0):
                    batch.ready.expect(announced)
                buffers = max(buffers, batch.engine.nbytes)
                first, tokens = runtime.rows_of(request, made, rows), batch.tokens
                watched = on_progress is not None or file is not None
                batch.begin(request.jobs(chunk), first, known, watched=watched)
                resumed += 0 if known is None else (known.shape[1] - 1) * len(chunk)
                before_it, whole = len(images) * tokens, len(wanted) * tokens
                report = partial(_report, batch, file, on_progress, before_it, whole)
                try:
                    done = batch.run(report if watched else None)
                    report()
                    if on_images is not None:
                        on_images(len(images), done.rendered)
                except BaseException:  # Ctrl-C and a lost device too: what is drawn is kept
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        if file is not None:
                            file.write(batch.snapshot())
                    raise
                images.extend(done.rendered)
                parts.append(done.decoded)
                self._otherwise = None  # this device serves
        seconds = PhaseSeconds(total=total.seconds, measuring=measuring, **phases.seconds)
        columns = request.num_images if only is None else 0
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        return runtime.make_result(
            request, decision, parts, images, seconds, buffers, columns, resumed
        )

    # --- parts of a request, for measurements, training and other libraries --------------------

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
        """Decode one batch of rows without pixels; return it, and the seconds of prefill and decoding.

        ``made`` returns the rows, and the shape of their conditions. If needed, auto times its steps on
        these. ``seeds``: the seed and number of each image, which select its random numbers.
        ``on_progress`` gets the committed tokens of the
        slowest image before each step. ``step`` replaces the captured step, for measurements of the
        state. ``observer`` is called after the acceptance of every step, which then runs operator by
        operator (:attr:`.Session.observer`).
        """
        report, count = passing(on_progress), len(seeds)
        jobs = [ImageJob(index, "", *seed) for index, seed in enumerate(seeds)]
        with self.request_lock.hold(), explain_errors(self.backend):
            rows, shape = made()
            decision = self.runtime.decide(
                strategy, sampling, shape, lambda _: rows, count, count, joins=True
            )
            batch = Batch[ImageJob](self.runtime, decision.parts[0], sampling, shape)
            batch.engine.session.observer = observer
            try:
                batch.begin(jobs, rows, watched=report is not None, step=step)
                done = batch.run(report and (lambda: report(batch.known)))
            finally:
                batch.engine.session.observer = None
            if report is not None:
                report(batch.known)
        return done.decoded, batch.phases.seconds["prefill"] + batch.phases.seconds["decode"]

    def _rows(self, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[Rows, Hashable]:
        """Return the first rows of prompts, and the shape of their conditions."""
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
        """Time a window's steps of each length, in turns; return milliseconds by length."""
        with self.request_lock.hold(), explain_errors(self.backend):
            rows, shape = self._rows(prompts, sampling)
            ready = self.engines.get(len(prompts), strategy, sampling, shape)
            ready.begin(rows, 0, range(len(prompts)))
            return calibrate(ready.engine, self.backend.stopwatch, rounds=rounds)


def _report(
    batch: Batch[ImageJob],
    file: Unfinished | None,
    on_progress: Callable[[int, int], None] | None,
    before: int,
    whole: int,
) -> None:
    """Report the committed tokens of all batches, ``before`` this one and in it, and save them."""
    if on_progress is not None:
        on_progress(before + batch.known * len(batch.images), whole)
    if file is not None:
        file.note(batch.snapshot)
