"""Holds a loaded model on an opened device: its settings, conditions, engines and pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lantern_accel._version import __version__
from lantern_accel.bounds import SEEDS
from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.base import Decoded, steps_by_accepted
from lantern_accel.decoding.target import above_of, row_of
from lantern_accel.device.backend import Backend, inferring
from lantern_accel.errors import DoesNotFitError, RequestError
from lantern_accel.families.base import Conditions, Model, Prompt, Rows, Size
from lantern_accel.generation.auto import AGAIN_MS, ROUNDS_AGAIN, Auto, describe_auto
from lantern_accel.generation.comparison import Comparison
from lantern_accel.generation.engines import CapturedEngine, Engines
from lantern_accel.generation.request import DEFAULT_STRATEGY, GenerationRequest
from lantern_accel.generation.result import (
    GenerationResult,
    GenerationStats,
    PhaseSeconds,
    pictures,
)
from lantern_accel.generation.timed import Timed
from lantern_accel.memory.limits import Capacity
from lantern_accel.strategy.choose import choose_strategy
from lantern_accel.strategy.rules import validated
from lantern_accel.strategy.values import (
    AUTO,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)

if TYPE_CHECKING:
    from PIL.Image import Image

#: From a strategy, its engine and what starts that on a request; None: there is no room for it.
Timing = Callable[[Strategy], tuple[AdaptiveEngine, Callable[[], None]] | None]
#: What is shown where nothing of a picture is decided yet.
EMPTY = 0xF0


class Loaded:
    """What every way of drawing shares: :class:`.Pipeline`, its streams, and rows of a server."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model = model
        self.backend = backend
        self.dtype = dtype
        self.engines = Engines(model, backend, Capacity(model, backend, dtype))
        self.auto = Auto(model, backend, dtype)
        self.auto.holds, self.auto.fits = self.engines.holds, self.engines.fits

    # --- settings ------------------------------------------------------------------------------

    @property
    def manifest(self) -> Any:
        """The model's manifest, with the default trees that this device's costs favour."""
        return self.auto.manifest

    def strategy(self, strategy: str | Strategy = DEFAULT_STRATEGY, **changes: Any) -> Strategy:
        """Return a strategy by name, with this model's defaults, and changes applied.

        A tree that nobody chose has no more nodes than the device's costs favour.

        ``changes``: ``tree`` (a tree, or text as ``--tree`` takes it), ``accept``, ``k``, ``delta``,
        ``lam``, ``residual``, ``neighbour_space``; None leaves the default.
        """
        return choose_strategy(self.manifest.defaults, strategy, **changes)

    def fitted(
        self, strategy: Strategy, batch: int | None, count: int, sampling: Sampling
    ) -> Strategy:
        """Return a strategy with the window for requests of ``count`` images, ``batch`` at a time.

        That is the one which ``lantern-accel tune`` kept for this device, or what costs of rows favour
        (:func:`.window_tokens`). Only for strategies by name, whose window nobody chose. ``batch`` None:
        as many as usual.
        """
        if not isinstance(strategy.drafts, Window) or strategy.name == AUTO:
            return strategy
        batch = batch or self.engines.usual_batch(count, strategy, sampling)
        size = self.engines.padded(min(batch, count), strategy, sampling)
        return self.auto.window(strategy, size, sampling)

    def sampling(self, **overrides: Any) -> Sampling:
        """Return this model's sampling settings with overrides (None leaves the default)."""
        values = self.model.manifest.defaults.sampling.model_dump()
        values.update({k: v for k, v in overrides.items() if v is not None})
        return validated(Sampling, values, "sampling")

    # --- requests ------------------------------------------------------------------------------

    def conditions(self, prompts: Sequence[Prompt], size: Size | None = None) -> Conditions:
        """Return what the prompts become before decoding, one condition per prompt."""
        device = self.backend.device
        conditions = self.model.family.conditions(self.model, prompts, device, self.dtype, size)
        text = self.model.text
        if text is not None and not self.engines.capacity.keeps_text(len(prompts)):
            text.release()
        return conditions

    def rows(
        self,
        conditions: Conditions,
        sampling: Sampling,
        negative: str | None = None,
        size: Size | None = None,
    ) -> Rows:
        """Return what an engine starts from; with ``negative`` guidance leads away from that prompt.

        It takes the place of the last branch, which has no prompt otherwise. Raises RequestError where
        the model, or the request, has no such branch, or where it cannot hold this text.
        """
        rows = self.model.family.rows(self.model, conditions, sampling)
        if not negative:
            return rows
        name = self.model.manifest.name
        if conditions.condition.dim() == 1:
            raise RequestError(
                f"the model {name!r} draws classes, and a negative_prompt is text; leave it out"
            )
        if sampling.branches != 2:
            raise RequestError(
                "a negative_prompt takes the place of guidance's second branch, and this request has "
                f"{sampling.branches}; set cfg_scale or guidance_scale above 1 where the model has "
                "guidance, or leave negative_prompt out"
            )
        count = len(conditions.condition)
        against = self.conditions([negative], size).pick([0] * count)
        own = len(rows.mask) > count
        same = own or bool((against.mask == conditions.mask).all())
        if against.condition.shape != conditions.condition.shape or not same:
            raise RequestError(
                f"the model {name!r} runs a prompt and its negative_prompt under one mask, so both need "
                "as many tokens; write one as long as the other"
            )
        condition, mask = rows.condition.clone(), rows.mask
        condition[count:] = against.condition
        if own:
            mask = torch.cat((mask[:count], against.mask.to(mask.device)))
        return Rows(condition, mask)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise :class:`RequestError` for a prompt that this model cannot draw."""
        self.conditions(prompts)

    def pictures(
        self, tokens: Tensor, shape: Hashable, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Image]:
        """Return the pictures of the first images of a batch, one per prompt.

        ``tokens`` ``[b, N]``; ``seeds``: of whatever randomness is left after decoding. Empty where this
        machine has nothing that paints.
        """
        count, seeds = len(prompts), [seed % SEEDS for seed in seeds]
        painted = self.model.family.paint(self.model, tokens[:count], shape, prompts, seeds)
        if painted is not None:
            return painted
        # All rows, for another number of images would be compiled anew.
        return pictures(self.pixels(tokens, shape)[:count])

    def pixels(self, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode tokens, int64 ``[n, tokens]``, to uint8 ``[n, H, W, 3]`` on the host (float32 VQ)."""
        tokens = tokens.to(self.backend.device)
        with self.backend.trim_memory():
            return self.model.family.pixels(self.model, tokens, shape).cpu()

    @inferring
    def partial_picture(self, tokens: Tensor, shape: Hashable = None) -> tuple[Image | None, int]:
        """Return a picture of an image's known tokens, and how many of its pixel rows are real.

        ``tokens`` int64 ``[known]``, row by row from the top. The tokenizer's decoder looks at a whole
        picture, so what is below the last finished row is filled with that row, decoded, and then painted
        over; colours of the finished rows still change a little when the rest is known. None before the
        first row is finished, and where a picture is not one grid of rows.
        """
        target, _ = self.model.family.target_for_shape(self.model, shape)
        if above_of(target.config) is not None:
            return None, 0
        total, row = int(target.config.num_tokens), row_of(target.config)
        rows = len(tokens) // row
        if not rows:
            return None, 0
        full = torch.empty(total, dtype=torch.int64)
        full[: rows * row] = tokens[: rows * row]
        for at in range(rows, total // row):  # an end of a row keeps its column
            full[at * row : (at + 1) * row] = tokens[(rows - 1) * row : rows * row]
        pixels = self.pixels(full.unsqueeze(0), shape)
        real = pixels.shape[1] * rows * row // total
        pixels[:, real:] = EMPTY
        return pictures(pixels)[0], real

    def finished(
        self,
        request: GenerationRequest,
        used: Strategy,
        parts: Sequence[Decoded],
        images: list[Image],
        seconds: PhaseSeconds,
        *,
        batch: int,
        slots: int,
        buffers: int,
        columns: int,
    ) -> GenerationResult:
        """Return the result of a request: its images, and what its batches counted.

        ``used``: what the request's strategy stood for; ``parts``: the batches; ``batch``: images decoded
        together, in ``slots`` rows; ``buffers``: bytes of the engine; ``columns``: images of each prompt.
        """
        rounding = self.model.rounding
        steps = sum(int(p.steps.sum()) for p in parts)
        tokens = sum(p.tokens.numel() for p in parts)
        count = sum(len(p.tokens) for p in parts)
        busy = seconds.prefill + seconds.decode
        drawn = torch.cat([p.tokens for p in parts]).clone()
        digest = hashlib.sha256(drawn.long().contiguous().numpy().tobytes()).hexdigest()
        auto = describe_auto(used, slots) if request.strategy.name == AUTO else None
        stats = GenerationStats(
            tokens=tokens,
            tokens_sha256=digest,
            steps=steps,
            step_compression=(tokens - count) / steps if steps else 1.0,
            accepted_histogram=steps_by_accepted(parts),
            total_variation=sum(float(p.price.sum()) for p in parts) / tokens
            + (0.0 if rounding is None else rounding.total_variation),
            rounding=rounding,
            seconds=seconds,
            tokens_per_second=None if self.backend.simulated else tokens / busy if busy else 0.0,
            images=count,
            prompts=list(request.prompts),
            device=str(self.backend.device),
            device_name=self.backend.facts().name,
            simulated=self.backend.simulated,
            backend=self.backend.name,
            backend_version=self.backend.version,
            dtype=str(self.dtype).removeprefix("torch."),
            model=self.model.manifest.name,
            weights_hash=self.model.weights_hash,
            strategy=used,
            auto=auto,
            sampling=request.sampling,
            seed=request.seed,
            seeds=None if request.seeds is None else list(request.seeds),
            negative_prompt=request.negative_prompt,
            batch_size=batch,
            buffers_bytes=buffers,
            lantern_accel=__version__,
            torch=torch.__version__,
        )
        return GenerationResult(images, drawn, stats, columns)

    # --- engines -------------------------------------------------------------------------------

    def release_engines(self) -> None:
        """Free the buffers and captured steps that are kept for the next call."""
        self.engines.release()

    @inferring
    def engine(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> CapturedEngine:
        """Return the engine of these settings with its captured functions, made on first use.

        ``auto`` stands for what is chosen for this batch. ``shape``: that of the conditions it will start
        from, where a model's are not all alike.
        """
        return self.engines.get(
            batch, self.auto.resolve(strategy, batch, sampling), sampling, shape
        )

    @inferring
    def engine_for(
        self, rows: Rows, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable
    ) -> CapturedEngine:
        """Return the engine that decodes ``rows``.

        Where nothing is known of auto's steps, they are timed on these rows first; what promises most is
        timed again between the first images.
        """
        ready = self.engine(batch, strategy, sampling, shape)
        begun = partial(self._begun_timing, rows, batch, sampling, shape)
        held = self.engines.capacity.copies
        if self.auto.unsettled(ready.engine, strategy, batch, sampling):
            found = self._timed(begun, strategy, batch, sampling)
        elif (due := self.auto.due(strategy, batch, sampling)) is not None:
            held -= copies_of(self.auto.resolve(strategy, batch, sampling))
            found = self._timed_again(begun, due, batch, sampling)
        else:
            return ready
        if found is not None:
            self.auto.settle(found, strategy, batch, sampling)
            held |= copies_of(self.auto.resolve(strategy, batch, sampling))
            self.engines.keep_copies(held)
        return self.engine(batch, strategy, sampling, shape)

    def _begun_timing(
        self, rows: Rows, batch: int, sampling: Sampling, shape: Hashable, chosen: Strategy
    ) -> tuple[AdaptiveEngine, Callable[[], None]] | None:
        """Return a source's engine, and what starts it on ``rows``; None: there is no room for it."""
        try:
            one = self.engines.get(batch, chosen, sampling, shape)
        except DoesNotFitError:  # not beside the first
            return None
        assert isinstance(one.engine, AdaptiveEngine)
        return one.engine, partial(one.begin, rows, 0, range(batch))

    def _timed(
        self, begun: Timing, strategy: Strategy, batch: int, sampling: Sampling
    ) -> Comparison | None:
        """Time what may draft for auto; None: a device has not captured all of its steps yet."""
        found: list[Timed] = []

        def sources() -> Iterator[Strategy]:
            yield strategy
            drafters = self.auto.chains(strategy, sampling), self.auto.trees(strategy)
            yield from (one for one in drafters if one is not None)
            # What the windows cost, which were timed first, says what copies are worth trying.
            yield from self.auto.likely_copies(strategy, found[0], batch, sampling)

        for asked in sources():
            one = begun(self.auto.resolve(asked, batch, sampling))
            if one is None:
                continue
            engine, begin = one
            if engine.usable is not None:  # more lengths are to come: they are timed with these
                return None
            found.append(self.auto.timed(engine, begin))
        return Comparison(timed=found)

    def _timed_again(
        self, begun: Timing, found: Comparison, batch: int, sampling: Sampling
    ) -> Comparison:
        """Time once more what may yet prove best, with longer windows where these may pay now."""
        for at in found.near(batch):
            source = self.auto.lengthened(found.timed[at], batch, sampling)
            one = begun(source.strategy)
            if one is not None:
                engine, begin = one
                begin()
                times = engine.calibrate(self.backend.stopwatch, ROUNDS_AGAIN, AGAIN_MS)
                found.timed[at] = source.timed_again(times)
        found.timings += 1
        return found


def copies_of(strategy: Strategy) -> frozenset[str]:
    """Return the weights of the copies that a strategy drafts with: one, or none."""
    tree = strategy.drafts
    return frozenset({tree.weights} if isinstance(tree, SelfDrafts) else ())
