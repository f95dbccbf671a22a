"""A loaded model on an opened device: what ``lantern_accel.load`` returns."""

from __future__ import annotations

import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from lantern_accel.decoding.engine import Decoded, Engine
from lantern_accel.decoding.geometry import check as check_settings
from lantern_accel.decoding.neighbours import cached_neighbour_table
from lantern_accel.device.backend import Backend, Replay, inferring
from lantern_accel.errors import BackendError, DeviceLostError, LanternWarning, RequestError
from lantern_accel.families.base import (
    Conditions,
    Model,
    Prompt,
    Size,
)
from lantern_accel.files import cache_dir
from lantern_accel.generation.result import GenerationRequest, GenerationResult, PhaseSeconds
from lantern_accel.generation.statistics_of import generation_stats
from lantern_accel.memory.limits import check_engine
from lantern_accel.memory.room import Room
from lantern_accel.strategy.presets import preset_for
from lantern_accel.strategy.values import (
    NeighbourSpace,
    NoTree,
    Sampling,
    Strategy,
    Tree,
    named_strategy,
    validated,
)

if TYPE_CHECKING:
    from PIL.Image import Image


__all__ = ["Pipeline", "Prompt", "Ready"]

#: Engines (buffers of one batch size, strategy and sampling) kept for reuse.
KEPT_ENGINES = 4
DEFAULT_STRATEGY = "lantern++"


@dataclass(frozen=True)
class Ready:
    """An engine with its captured prefill and step."""

    engine: Engine
    prefill: Replay
    step: Replay

    def release(self) -> None:
        """Free what the captured functions hold."""
        self.prefill.release()
        self.step.release()


class Pipeline:
    """Generates images; reuses its buffers from call to call. Close it, or use it with ``with``."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model = model
        self.backend = backend
        self.dtype = dtype
        self._engines: OrderedDict[Any, Ready] = OrderedDict()
        self._neighbours: dict[tuple[int, str], Tensor] = {}
        self._room = Room(model, backend, dtype)
        self._warmed: list[str] = []
        self.kept_engines = KEPT_ENGINES

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release captured steps, buffers and the device."""
        self.release_engines()
        self.backend.close()

    def release_engines(self) -> None:
        """Free the buffers and captured steps that are kept for the next call."""
        for ready in self._engines.values():
            ready.release()
        self._engines.clear()

    # --- settings ------------------------------------------------------------------------------

    def strategy(self, strategy: str | Strategy = DEFAULT_STRATEGY, **overrides: Any) -> Strategy:
        """Return a strategy by name, with this model's trees and defaults, and overrides applied.

        ``overrides``: ``tree`` (a tree, or text as ``--tree`` takes it), ``k``, ``delta``, ``lam``,
        ``residual``, ``neighbour_space``; None leaves the default.
        """
        if isinstance(overrides.get("tree"), str):
            from lantern_accel.decoding.trees import parse_tree

            overrides["tree"] = parse_tree(overrides["tree"])
        if isinstance(strategy, Strategy):
            chosen = strategy
        else:
            defaults = self.model.manifest.defaults
            chosen = named_strategy(
                strategy,
                static=defaults.static_tree,
                dynamic=defaults.dynamic_tree,
                lantern=defaults.lantern,
                lantern_pp=defaults.lantern_pp,
            )
        return chosen.override(**overrides)

    def tuned(self, strategy: Strategy, temperature: float) -> Strategy:
        """Return the strategy over the tree that ``lantern-accel tune`` found for this device, if any.

        Only the model's default tree is replaced: a tree that was asked for stays.
        """
        from lantern_accel.strategy.store import key_of, read_tuned

        if strategy.tree != self.model.manifest.defaults.static_tree:
            return strategy
        found = read_tuned(key_of(self, strategy, temperature))
        return strategy if found is None else strategy.override(tree=found.tree)

    def sampling(self, **overrides: Any) -> Sampling:
        """Return this model's sampling settings with overrides (None leaves the default)."""
        values = self.model.manifest.defaults.sampling.model_dump()
        values.update({k: v for k, v in overrides.items() if v is not None})
        return validated(Sampling, values, "sampling")

    def conditions(self, prompts: Sequence[Prompt], size: Size | None = None) -> Conditions:
        """Return what the prompts become before decoding, one condition a prompt."""
        device = self.backend.device
        conditions = self.model.family.conditions(self.model, prompts, device, self.dtype, size)
        if self.model.text is not None:
            self.model.text.release()
        return conditions

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise :class:`RequestError` for a prompt that this model cannot draw."""
        self.conditions(prompts)

    # --- engines -------------------------------------------------------------------------------

    def neighbours(self, k: int, space: NeighbourSpace | None = None) -> Tensor:
        """Return the neighbour table of the codebook, int32 ``[V, k]``, from the disk cache or new.

        ``space``: where distance is measured; None: as the model says.
        """
        space = space or self.model.manifest.neighbour_space
        if (k, space) not in self._neighbours:
            rows, on_sphere = self.model.family.codebook(self.model)
            table = cached_neighbour_table(
                rows, k, normalise=on_sphere and space == "decoder", cache=cache_dir()
            )
            # A code that stands for no patch, such as the end of a row, is near nothing: whatever its row
            # says has no mass where that code may be.
            more = self.model.manifest.target.vocab_size - len(table)
            table = torch.cat((table, table[:more] * 0)) if more else table
            self._neighbours[k, space] = table.to(self.backend.device)
        return self._neighbours[k, space]

    @inferring
    def warm_up(
        self,
        batches: Sequence[int] = (1,),
        strategies: Sequence[str | Strategy] = ("lantern++",),
        **sampling: Any,
    ) -> None:
        """Compile the buckets of these batch sizes and strategies, so that no request waits for it.

        ``sampling`` as :meth:`generate` takes it. A request of another bucket is served with a warning
        afterwards. Raises RequestError for more buckets than are kept.
        """
        if len(batches) * len(strategies) > self.kept_engines:
            raise RequestError(
                f"{len(batches)} batch sizes of {len(strategies)} strategies are more buckets than the "
                f"{self.kept_engines} that are kept; warm up fewer"
            )
        settings = self.sampling(**sampling)
        self._warmed = []
        for batch in batches:
            for given in strategies:
                chosen = self.strategy(given)
                if isinstance(given, str):
                    chosen = self.tuned(chosen, settings.temperature)
                self.engine(batch, chosen, settings, self.model.family.usual_shape(self.model))
        self._warmed = [f"{name} x {n}" for n in batches for name in map(_name, strategies)]

    def engine(
        self, batch: int, strategy: Strategy, sampling: Sampling, shape: Hashable = None
    ) -> Ready:
        """Return the engine of these settings with its captured functions, made on first use.

        ``shape``: that of the conditions it will start from, where a model's are not all alike.
        """
        key = (batch, strategy.model_dump_json(), sampling.model_dump_json(), shape)
        if key not in self._engines:
            if self._warmed:
                warnings.warn(
                    f"this bucket ({strategy.name} x {batch}, or its sampling) was not warmed up and is "
                    f"compiled now; warm are: {', '.join(self._warmed)}",
                    LanternWarning,
                    stacklevel=2,
                )
            k = strategy.neighbours
            check_settings(strategy, sampling, self.model.manifest.target.vocab_size)
            target, drafter = self.model.family.fitted(self.model, shape)
            self._make_room(batch, strategy, sampling, (target, drafter))
            with self._explained():
                engine = Engine(
                    target,
                    drafter,
                    self.backend,
                    strategy,
                    sampling,
                    batch=batch,
                    neighbours=self.neighbours(k, strategy.neighbour_space) if k else None,
                )
                self._engines[key] = Ready(
                    engine,
                    self.backend.capture(engine.prefill, "prefill"),
                    self.backend.capture(engine.step, "step"),
                )
        self._engines.move_to_end(key)
        return self._engines[key]

    def _make_room(
        self, batch: int, strategy: Strategy, sampling: Sampling, parts: tuple[Any, Any]
    ) -> None:
        """Release kept engines, the oldest first, until a new one fits; raise where none does."""
        beside = self._room.beside(strategy, sampling)
        while True:
            room = len(self._engines) < self.kept_engines
            try:
                if not self._room.plenty(batch, strategy, sampling):
                    check_engine(self.backend, *parts, strategy, sampling, batch, beside)
                if room:
                    return
            except BackendError:
                if not self._engines:
                    raise
            self._engines.popitem(last=False)[1].release()

    def _batch(self, request: GenerationRequest, count: int) -> int:
        """Return how many images to decode together: as asked, else what suits and fits the device."""
        if request.batch_size is not None:
            return min(request.batch_size, count)
        usual = min(self.backend.default_batch, count)
        drafts = not isinstance(request.strategy.tree, NoTree)
        if usual == 1 or (drafts and self.model.drafter is None):
            return usual
        held = sum(ready.engine.nbytes for ready in self._engines.values())
        return max(1, self._room.fitting(usual, request.strategy, request.sampling, held))

    @contextmanager
    def _explained(self, finished: Sequence[Tensor] = ()) -> Iterator[None]:
        """Let errors of the device say what they mean and carry the pixels that were ``finished``."""
        try:
            yield
        except Exception as error:
            known = error if isinstance(error, BackendError) else self.backend.explain(error)
            if isinstance(known, DeviceLostError):
                known.images = _pictures(finished)
            if known is None or known is error:
                raise
            raise known from error

    # --- generation ----------------------------------------------------------------------------

    def request(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        preset: str | None = None,
        strategy: str | Strategy | None = None,
        num_images: int = 1,
        seed: int | None = None,
        batch_size: int | None = None,
        size: Size | None = None,
        tree: str | Tree | None = None,
        k: int | None = None,
        delta: float | None = None,
        lam: float | None = None,
        residual: str | None = None,
        neighbour_space: NeighbourSpace | None = None,
        **sampling: Any,
    ) -> GenerationRequest:
        """Check a request and fill in a preset's or the model's defaults, before any work is done."""
        prompts = (prompt,) if isinstance(prompt, str | int) else tuple(prompt)
        if not prompts:
            raise RequestError("there is no prompt; give at least one")
        changes: dict[str, Any] = {
            "tree": tree,
            "k": k,
            "delta": delta,
            "lam": lam,
            "residual": residual,
            "neighbour_space": neighbour_space,
        }
        if preset is not None:
            published = preset_for(preset, self.model.manifest)
            sampling = _filled(sampling, published.sampling)
            if strategy is None or strategy == published.strategy:
                strategy = published.strategy
                changes = _filled(changes, published.overrides)
        chosen = self.strategy(strategy or DEFAULT_STRATEGY, **changes)
        settings = self.sampling(**sampling)
        if changes["tree"] is None and not isinstance(strategy, Strategy):
            chosen = self.tuned(chosen, settings.temperature)
        try:
            return GenerationRequest(
                prompts=prompts,
                strategy=chosen,
                sampling=settings,
                num_images=num_images,
                seed=secrets.randbits(31) if seed is None else seed,
                batch_size=batch_size,
                size=size,
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise RequestError(message if "empty" in message else f"{where}: {message}") from None

    @inferring
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Generate images for one prompt or a list; see :func:`lantern_accel.generate`.

        ``on_progress`` gets the image tokens known so far and the total.
        """
        request = self.request(prompt, **options)
        watch = self.backend.stopwatch
        arrays: list[Tensor] = []
        with self._explained(arrays), watch() as total:
            with watch() as text:
                conditions = self.conditions(request.prompts, request.size)
            picks = [i for i in range(len(request.prompts)) for _ in range(request.num_images)]
            count = len(picks)
            batch = self._batch(request, count)
            prefill = decode = pixels = 0.0
            self._expect(request, count, batch, conditions.shape)
            parts: list[Decoded] = []
            buffers = 0
            for start in range(0, count, batch):
                here = picks[start : start + batch]
                images = list(range(start, start + len(here)))
                ready = self.engine(len(here), request.strategy, request.sampling, conditions.shape)
                engine = ready.engine
                size = engine.geometry.tokens
                report = _offset(on_progress, start, len(here), size, count)
                buffers = max(buffers, engine.nbytes)
                rows = self.model.family.rows(self.model, conditions.pick(here), request.sampling)
                with watch() as prefill_watch:
                    uniforms = engine.uniforms(request.seed, images)
                    engine.start(rows.condition, rows.mask, uniforms, ready.prefill)
                with watch() as decode_watch:
                    done = engine.run(ready.step, report)
                with watch() as pixels_watch:
                    arrays.append(self.pixels(done.tokens, conditions.shape))
                prefill += prefill_watch.seconds
                decode += decode_watch.seconds
                pixels += pixels_watch.seconds
                parts.append(done)
        stats = generation_stats(
            self,
            request,
            parts,
            PhaseSeconds(
                text=text.seconds,
                prefill=prefill,
                decode=decode,
                pixels=pixels,
                total=total.seconds,
            ),
            batch,
            buffers,
        )
        tokens = torch.cat([p.tokens for p in parts]).clone()
        return GenerationResult(_pictures(arrays), tokens, stats)

    @inferring
    def decode_only(
        self,
        prompts: Sequence[Prompt],
        strategy: Strategy,
        sampling: Sampling,
        seed: int,
        step: Callable[[], None] | None = None,
    ) -> tuple[Decoded, float]:
        """Decode one batch without pixels; return it and the seconds of prefill and decode.

        ``step`` runs in place of the captured step (for measurements that look at the state).
        """
        conditions = self.conditions(prompts)
        ready = self.engine(len(prompts), strategy, sampling, conditions.shape)
        engine = ready.engine
        rows = self.model.family.rows(self.model, conditions, sampling)
        uniforms = engine.uniforms(seed, list(range(len(prompts))))
        with self._explained(), self.backend.stopwatch() as watch:
            engine.start(rows.condition, rows.mask, uniforms, ready.prefill)
            decoded = engine.run(step or ready.step)
        return decoded, watch.seconds

    def _expect(self, request: GenerationRequest, count: int, batch: int, shape: Hashable) -> None:
        """Tell the captured functions how often the request will call them."""
        whole, rest = divmod(count, batch)
        for size, times in ((batch, whole), (rest, 1)):
            if size and times:
                ready = self.engine(size, request.strategy, request.sampling, shape)
                ready.prefill.expect(times)
                # Half as many steps as tokens: about what speculation leaves.
                drafts = ready.engine.geometry.depth > 0
                ready.step.expect(times * ready.engine.geometry.tokens // (2 if drafts else 1))

    def pixels(self, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode tokens, int64 ``[n, tokens]``, to uint8 ``[n, H, W, 3]`` on the host (float32 VQ)."""
        tokens = tokens.to(self.backend.device)
        with self.backend.giving_back():
            return self.model.family.pixels(self.model, tokens, shape).cpu()


def _name(strategy: str | Strategy) -> str:
    return strategy if isinstance(strategy, str) else strategy.name


def _pictures(arrays: Sequence[Tensor]) -> list[Image]:
    """Turn pixels, uint8 ``[n, H, W, 3]`` each, into pictures."""
    from PIL import Image

    return [Image.fromarray(a.numpy()) for array in arrays for a in array]


def _filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return ``given`` with what it leaves None taken from ``defaults``."""
    known = {key: value for key, value in given.items() if value is not None}
    return {**dict.fromkeys(given), **defaults, **known}


def _offset(
    report: Callable[[int, int], None] | None, start: int, images: int, size: int, count: int
) -> Callable[[int], None] | None:
    """Turn a batch's progress (tokens known by its slowest image) into the request's."""
    if report is None:
        return None
    return lambda known: report(start * size + known * images, count * size)
