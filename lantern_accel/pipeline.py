"""A loaded model on an opened device: what ``lantern_accel.load`` returns."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from lantern_accel.backend import Backend, Replay
from lantern_accel.decoding.engine import Decoded, Engine
from lantern_accel.decoding.neighbours import cached_neighbour_table
from lantern_accel.errors import BackendError, DeviceLostError, LanternWarning, RequestError
from lantern_accel.files import cache_dir
from lantern_accel.memory import check_engine, check_weights
from lantern_accel.models.bundle import Model
from lantern_accel.models.text import tokenize
from lantern_accel.models.vq import pixels_to_uint8
from lantern_accel.strategy import Sampling, Strategy, Tree, named_strategy, validated
from lantern_accel.types import GenerationRequest, GenerationResult, GenerationStats, PhaseSeconds

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.plugins import Chosen

#: Engines (buffers of one batch size, strategy and sampling) kept for reuse.
KEPT_ENGINES = 4

Prompt = str | int


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
        self._neighbours: dict[int, Tensor] = {}
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

    def strategy(self, strategy: str | Strategy = "lantern++", **overrides: Any) -> Strategy:
        """Return a strategy by name, with this model's trees and defaults, and overrides applied.

        ``overrides``: ``tree`` (a tree, or text as ``--tree`` takes it), ``k``, ``delta``, ``lam``,
        ``residual``; None leaves the default.
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
        from lantern_accel.tuned import key_of, read_tuned

        if strategy.tree != self.model.manifest.defaults.static_tree:
            return strategy
        found = read_tuned(key_of(self, strategy, temperature))
        return strategy if found is None else strategy.override(tree=found.tree)

    def sampling(self, **overrides: Any) -> Sampling:
        """Return this model's sampling settings with overrides (None leaves the default)."""
        values = self.model.manifest.defaults.sampling.model_dump()
        values.update({k: v for k, v in overrides.items() if v is not None})
        return validated(Sampling, values, "sampling")

    # --- conditions ----------------------------------------------------------------------------

    def _conditions(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """Return a condition a prompt and its prefix mask, bool ``[n, prefix]``."""
        config = self.model.manifest.target
        device = self.backend.device
        if config.conditioning == "class":
            ids = [self._class_id(p, config.num_classes) for p in prompts]
            mask = torch.ones(len(ids), 1, dtype=torch.bool)
            return torch.tensor(ids).to(device), mask.to(device)
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise RequestError(
                    f"the model {self.model.manifest.name!r} takes text, not the class {prompt!r}"
                )
        if self.model.text is None:
            raise RequestError(
                f"the model {self.model.manifest.name!r} has no text encoder in its folder"
            )
        texts = [str(prompt) for prompt in prompts]
        words, mask = tokenize(self.model.text_tokenizer, texts, self.model.text.config)
        features = self.model.text(words, mask)
        return features.to(device=device, dtype=self.dtype), mask.to(device)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise :class:`RequestError` for a prompt that this model cannot draw."""
        self._conditions(prompts)

    def _class_id(self, prompt: Prompt, classes: int) -> int:
        try:
            value = int(prompt)
        except ValueError:
            value = -1
        if not 0 <= value < classes:
            raise RequestError(
                f"the model {self.model.manifest.name!r} takes class ids from 0 to {classes - 1}, "
                f"not {prompt!r}"
            )
        return value

    def _rows(self, condition: Tensor, mask: Tensor, sampling: Sampling) -> Tensor:
        """Return the engine's rows: ``[cond; uncond]`` with guidance, else ``[cond]``."""
        if not sampling.guided:
            return condition
        target = self.model.target
        free = target.unconditional(condition.shape[0]).to(condition.dtype)
        if condition.dim() == 3:
            # LlamaGen hides the same positions in the unconditional row.
            free = free * mask.unsqueeze(-1).to(free.dtype)
        return torch.cat((condition, free))

    # --- engines -------------------------------------------------------------------------------

    def neighbours(self, k: int) -> Tensor:
        """Return the neighbour table of the codebook, int32 ``[V, k]``, from the disk cache or new."""
        if k not in self._neighbours:
            vq = self.model.vq
            table = cached_neighbour_table(
                vq.quantize.embedding.weight,
                k,
                normalise=vq.config.l2_norm and self.model.manifest.neighbour_space == "decoder",
                cache=cache_dir(),
            )
            self._neighbours[k] = table.to(self.backend.device)
        return self._neighbours[k]

    @torch.inference_mode()
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
                self.engine(batch, chosen, settings)
        self._warmed = [f"{name} x {n}" for n in batches for name in map(_name, strategies)]

    def engine(self, batch: int, strategy: Strategy, sampling: Sampling) -> Ready:
        """Return the engine of these settings with its captured functions, made on first use."""
        key = (batch, strategy.model_dump_json(), sampling.model_dump_json())
        if key not in self._engines:
            if self._warmed:
                warnings.warn(
                    f"this bucket ({strategy.name} x {batch}, or its sampling) was not warmed up and is "
                    f"compiled now; warm are: {', '.join(self._warmed)}",
                    LanternWarning,
                    stacklevel=2,
                )
            k = strategy.neighbours
            Engine.check(strategy, sampling, self.model.manifest.target.vocab_size)
            self._make_room(batch, strategy, sampling)
            with self._explained():
                engine = Engine(
                    self.model.target,
                    self.model.drafter,
                    self.backend,
                    strategy,
                    sampling,
                    batch=batch,
                    neighbours=self.neighbours(k) if k else None,
                )
                self._engines[key] = Ready(
                    engine,
                    self.backend.capture(engine.prefill, "prefill"),
                    self.backend.capture(engine.step, "step"),
                )
        self._engines.move_to_end(key)
        return self._engines[key]

    def _make_room(self, batch: int, strategy: Strategy, sampling: Sampling) -> None:
        """Release kept engines, the oldest first, until a new one's buffers fit; raise where none do."""
        while True:
            room = len(self._engines) < self.kept_engines
            try:
                model = self.model
                check_engine(self.backend, model.target, model.drafter, strategy, sampling, batch)
                if room:
                    return
            except BackendError:
                if not self._engines:
                    raise
            self._engines.popitem(last=False)[1].release()

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
        strategy: str | Strategy = "lantern++",
        num_images: int = 1,
        seed: int | None = None,
        batch_size: int | None = None,
        tree: str | Tree | None = None,
        k: int | None = None,
        delta: float | None = None,
        lam: float | None = None,
        residual: str | None = None,
        **sampling: Any,
    ) -> GenerationRequest:
        """Check a request and fill in the model's defaults; raises before any work is done."""
        prompts = (prompt,) if isinstance(prompt, str | int) else tuple(prompt)
        if not prompts:
            raise RequestError("there is no prompt; give at least one")
        chosen = self.strategy(strategy, tree=tree, k=k, delta=delta, lam=lam, residual=residual)
        settings = self.sampling(**sampling)
        if tree is None and isinstance(strategy, str):
            chosen = self.tuned(chosen, settings.temperature)
        try:
            return GenerationRequest(
                prompts=prompts,
                strategy=chosen,
                sampling=settings,
                num_images=num_images,
                seed=secrets.randbits(31) if seed is None else seed,
                batch_size=batch_size,
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise RequestError(message if "empty" in message else f"{where}: {message}") from None

    @torch.inference_mode()
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
                condition, mask = self._conditions(request.prompts)
            picks = [i for i in range(len(request.prompts)) for _ in range(request.num_images)]
            count = len(picks)
            batch = min(request.batch_size or self.backend.default_batch, count)
            size = self.model.manifest.target.num_tokens
            prefill = decode = pixels = 0.0
            self._expect(request, count, batch)
            parts: list[Decoded] = []
            buffers = 0
            for start in range(0, count, batch):
                here = picks[start : start + batch]
                images = list(range(start, start + len(here)))
                report = _offset(on_progress, start, len(here), size, count)
                ready = self.engine(len(here), request.strategy, request.sampling)
                engine = ready.engine
                buffers = max(buffers, engine.nbytes)
                rows = self._rows(condition[here], mask[here], request.sampling)
                with watch() as prefill_watch:
                    uniforms = engine.uniforms(request.seed, images)
                    engine.start(rows, mask[here], uniforms, ready.prefill)
                with watch() as decode_watch:
                    done = engine.run(ready.step, report)
                with watch() as pixels_watch:
                    arrays.append(self.pixels(done.tokens))
                prefill += prefill_watch.seconds
                decode += decode_watch.seconds
                pixels += pixels_watch.seconds
                parts.append(done)
        stats = self._stats(
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

    @torch.inference_mode()
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
        condition, mask = self._conditions(prompts)
        ready = self.engine(len(prompts), strategy, sampling)
        engine = ready.engine
        rows = self._rows(condition, mask, sampling)
        uniforms = engine.uniforms(seed, list(range(len(prompts))))
        with self._explained(), self.backend.stopwatch() as watch:
            engine.start(rows, mask, uniforms, ready.prefill)
            decoded = engine.run(step or ready.step)
        return decoded, watch.seconds

    def _expect(self, request: GenerationRequest, count: int, batch: int) -> None:
        """Tell the captured functions how often the request will call them."""
        whole, rest = divmod(count, batch)
        for size, times in ((batch, whole), (rest, 1)):
            if size and times:
                ready = self.engine(size, request.strategy, request.sampling)
                ready.prefill.expect(times)
                # Half as many steps as tokens: about what speculation leaves.
                drafts = ready.engine.geometry.depth > 0
                ready.step.expect(times * ready.engine.geometry.tokens // (2 if drafts else 1))

    def pixels(self, tokens: Tensor) -> Tensor:
        """Decode tokens, int64 ``[n, tokens]``, to uint8 ``[n, H, W, 3]`` on the host (float32 VQ)."""
        grid = self.model.manifest.target.grid
        codes = tokens.to(self.backend.device).view(-1, grid, grid)
        return pixels_to_uint8(self.model.vq.decode_codes(codes)).cpu()

    def _stats(
        self,
        request: GenerationRequest,
        parts: list[Decoded],
        seconds: PhaseSeconds,
        batch: int,
        buffers: int,
    ) -> GenerationStats:
        import lantern_accel

        steps = sum(int(p.steps.sum()) for p in parts)
        tokens = sum(p.tokens.numel() for p in parts)
        images = sum(len(p.tokens) for p in parts)
        histogram = sum((p.histogram.sum(0) for p in parts[1:]), parts[0].histogram.sum(0))
        busy = seconds.prefill + seconds.decode
        drawn = torch.cat([p.tokens for p in parts]).long().contiguous().numpy()
        return GenerationStats(
            tokens=tokens,
            tokens_sha256=hashlib.sha256(drawn.tobytes()).hexdigest(),
            steps=steps,
            step_compression=(tokens - images) / steps if steps else 1.0,
            accepted_histogram=histogram.tolist(),
            total_variation=sum(float(p.moved.sum()) for p in parts) / tokens,
            seconds=seconds,
            tokens_per_second=None if self.backend.simulated else tokens / busy if busy else 0.0,
            images=images,
            prompts=list(request.prompts),
            device=str(self.backend.device),
            device_name=self.backend.facts().name,
            simulated=self.backend.simulated,
            backend=self.backend.name,
            backend_version=self.backend.version,
            dtype=str(self.dtype).removeprefix("torch."),
            model=self.model.manifest.name,
            weights_hash=self.model.weights_hash,
            strategy=request.strategy,
            sampling=request.sampling,
            seed=request.seed,
            batch_size=batch,
            buffers_bytes=buffers,
            lantern_accel=lantern_accel.__version__,
            torch=torch.__version__,
        )


def _name(strategy: str | Strategy) -> str:
    return strategy if isinstance(strategy, str) else strategy.name


def _pictures(arrays: Sequence[Tensor]) -> list[Image]:
    """Turn pixels, uint8 ``[n, H, W, 3]`` each, into pictures."""
    from PIL import Image

    return [Image.fromarray(a.numpy()) for array in arrays for a in array]


def _offset(
    report: Callable[[int, int], None] | None, start: int, images: int, size: int, count: int
) -> Callable[[int], None] | None:
    """Turn a batch's progress (tokens known by its slowest image) into the request's."""
    if report is None:
        return None
    return lambda known: report(start * size + known * images, count * size)


def open_pipeline(model: str | Path, device: Chosen, dtype: str) -> Pipeline:
    """Open the device, then load the model on it; see :func:`lantern_accel.load`."""
    from lantern_accel.models.bundle import find_model, load_model

    folder = find_model(model)
    backend = device.open()
    try:
        if backend.device.type == "meta":
            raise BackendError(
                f"the backend {backend.name!r} has shapes and no data, so it draws nothing; choose "
                "another device (`lantern-accel devices` lists them)"
            )
        policy = backend.dtypes(dtype)
        check_weights(backend, folder, policy.compute)
        loaded = load_model(folder, backend, dtype=policy.compute, device=backend.device)
    except BaseException:
        backend.close()
        raise
    return Pipeline(loaded, backend, policy.compute)
