"""A loaded model on an opened device, with its engines, as requests, streams and servers hold it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lantern_accel._version import __version__
from lantern_accel.bounds import SEEDS
from lantern_accel.decoding.decoded import Decoded
from lantern_accel.device.backend import Backend
from lantern_accel.device.context import inferring
from lantern_accel.errors import RequestError
from lantern_accel.families.base import Conditions, Model, Prompt, Rows, Size
from lantern_accel.generation.decision import BatchPlan, Decision, decide, describe_auto
from lantern_accel.generation.engines import Engines
from lantern_accel.generation.measurements import Measurements
from lantern_accel.generation.request import GenerationRequest, ImageJob
from lantern_accel.generation.result import (
    GenerationResult,
    GenerationStats,
    PhaseSeconds,
    describe,
    loss_of,
    to_images,
    tokens_sha256,
)
from lantern_accel.strategy.lengths import compare_with_exact
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image

#: What is shown where nothing of an image is decided yet.
EMPTY = 0xF0


class Runtime:
    """A loaded model on an opened device: its conditions, engines, measurements and pixels."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model, self.backend, self.dtype = model, backend, dtype
        self.engines = Engines(model, backend, dtype)
        self.measurements = Measurements(self.engines)

    @property
    def place(self) -> dict[str, str]:
        """Model, device and dtype that a decision is made for, by the names of its fields."""
        backend, model = self.backend, self.model
        return {
            "model": model.manifest.name,
            "weights_hash": model.weights_hash,
            "backend": f"{backend.name} {backend.version}",
            "device": backend.facts().name,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @inferring
    def decide(
        self,
        asked: Strategy,
        sampling: Sampling,
        shape: Hashable,
        rows: Callable[[int], Rows],
        images: int,
        batch: int | None = None,
        size: Size | None = None,
        *,
        joins: bool = False,
    ) -> Decision:
        """Decide what some images are decoded with, ``batch`` at once; None: as many as fit.

        ``shape``: of the images; ``rows``: what the first ones start from, by their number. ``joins``:
        images join and leave the rows of one batch, so that there is no second batch for the rest.
        """
        capacity, measured = self.engines.capacity, {}
        if asked.name == AUTO:  # before anything is timed
            self.engines.check(asked, sampling)
        batches = capacity.batches(images, batch, asked, sampling, shape)
        if joins:
            batches = {max(batches): max(batches)}
        for count in batches.values() if asked.name == AUTO else ():
            measured[count] = self.measurements.ask(asked, count, sampling, shape, rows)
        return decide(asked, sampling, batches, measured, capacity, self.place, shape, size)

    @inferring
    def conditions(
        self, prompts: Sequence[Prompt], size: Size | None = None, negative: str | None = None
    ) -> Conditions:
        """Return what the prompts become before decoding, one condition per prompt.

        ``negative``: as :meth:`rows` gets it; where it has positions of its own, conditions hold it too.
        """
        device, model = self.backend.device, self.model
        texts = [*prompts, negative] if negative and model.target.own_prompts else prompts
        conditions = model.family.conditions(model, texts, device, self.dtype, size)
        conditions = conditions.pick(range(len(prompts)))
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
                f"the model {name!r} is class-conditional, and a negative_prompt is text; leave it out"
            )
        if sampling.branches != 2:
            raise RequestError(
                "a negative_prompt takes the place of guidance's second branch, and this request has "
                f"{sampling.branches}; set cfg_scale or guidance_scale above 1 where the model has "
                "guidance, or leave negative_prompt out"
            )
        count = len(conditions.condition)
        against, own = self.conditions([negative], size), len(rows.mask) > count
        if own:  # as long as the prompts
            against = self.model.family.join(self.model, [conditions.pick([0]), against]).pick([1])
        against = against.pick([0] * count)
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

    def rows_of(
        self, request: GenerationRequest, conditions: Conditions, images: Sequence[int]
    ) -> Rows:
        """Return what an engine starts from for these images of a request."""
        picked = conditions.pick([index // request.num_images for index in images])
        return self.rows(picked, request.sampling, request.negative_prompt, request.size)

    def decode_images(
        self,
        tokens: Tensor,
        shape: Hashable,
        jobs: Sequence[ImageJob],
    ) -> list[Image]:
        """Decode the first images of a batch, ``tokens`` ``[b, N]``; seeds decide what is left open.

        Empty where this machine has nothing that paints.
        """
        count, prompts = len(jobs), [one.prompt for one in jobs]
        seeds = [(one.seed + one.number) % SEEDS for one in jobs]
        made = self.model.family.render_images(self.model, tokens[:count], shape, prompts, seeds)
        if made is not None:
            return made
        # All rows, for another number of images would be compiled again.
        return to_images(self.pixels(tokens, shape)[:count])

    def images_of(
        self,
        request: GenerationRequest,
        shape: Hashable,
        decision: Decision,
        part: BatchPlan,
        decoded: Decoded,
        jobs: Sequence[ImageJob],
    ) -> list[Image]:
        """Decode a request's images, which say what they were made from: ``part`` of ``decision``."""
        made = self.decode_images(decoded.tokens, shape, jobs)
        own = decision.model_copy(update={"parts": (part.model_copy(update={"free": None}),)})
        describe(made, request, jobs[: len(made)], decoded, own, self.model.rounding)
        return made

    @inferring
    def pixels(self, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode tokens, int64 ``[n, tokens]``, to uint8 ``[n, H, W, 3]`` on the host (float32 VQ)."""
        with self.backend.trim_memory():
            tokens = tokens.to(self.backend.device)
            return self.model.family.pixels(self.model, tokens, shape).cpu()

    @inferring
    def partial_image(self, tokens: Tensor, shape: Hashable = None) -> tuple[Image | None, int]:
        """Decode an image's known tokens; return how many of its pixel rows are real, too.

        ``tokens`` int64 ``[known]``, row by row from the top. The tokenizer's decoder looks at a whole
        image, so what is below the last finished row is filled with that row, decoded, and then painted
        over; colours of the finished rows still change a little when the rest is known. None before the
        first row is finished, and where an image is not one grid of rows.
        """
        target, _ = self.model.family.target_for_shape(self.model, shape)
        if target.config.above is not None:
            return None, 0
        total, row = target.config.num_tokens, target.config.row_tokens
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
        return to_images(pixels)[0], real

    # --- results -------------------------------------------------------------------------------

    def make_result(
        self,
        request: GenerationRequest,
        decision: Decision,
        parts: Sequence[Decoded],
        images: list[Image],
        seconds: PhaseSeconds,
        buffers: int,
        columns: int,
        resumed: int = 0,
    ) -> GenerationResult:
        """Return the result of a request: its images, and what its batches, ``parts``, counted.

        ``buffers``: bytes of the engine; ``columns``: images of each prompt; ``resumed``: tokens that
        an interrupted call had drawn.
        """
        model, backend = self.model, self.backend
        rounding = model.rounding
        steps = sum(int(p.steps.sum()) for p in parts)
        with torch.inference_mode(False):  # the caller's own, to change and to learn from
            sampled = torch.cat([p.tokens for p in parts])
        tokens, count = sampled.numel(), len(sampled)
        busy = seconds.prefill + seconds.decode
        moved, auto = sum(float(p.quality_loss.sum()) for p in parts) / tokens, None
        if decision.asked == AUTO:
            passes = f"; {steps} forward passes, not {tokens - count - resumed}"
            auto = describe_auto(decision.strategy, decision.parts[0].rows, passes)
            exact = decision.parts[0].exact_tokens_per_step
            auto += "" if exact is None else f"; {compare_with_exact(exact, moved)}"
            auto += self.measurements.doubt if seconds.measuring else ""
        stats = GenerationStats(
            tokens=tokens,
            tokens_sha256=tokens_sha256(sampled),
            steps=steps,
            step_compression=(tokens - count - resumed) / steps if steps else 1.0,
            resumed=resumed,
            accepted_histogram=steps_by_accepted(parts),
            total_variation_per_token=moved + loss_of(rounding),
            rounding=rounding,
            seconds=seconds,
            tokens_per_second=None
            if backend.simulated
            else (tokens - resumed) / (busy or math.inf),
            seconds_per_image=None if backend.simulated else seconds.total / count,
            images=count,
            prompts=list(request.prompts),
            device=str(backend.device),
            device_name=backend.facts().name,
            simulated=backend.simulated,
            backend=backend.name,
            backend_version=backend.version,
            dtype=decision.dtype,
            model=model.manifest.name,
            weights_hash=model.weights_hash,
            strategy=decision.strategy,
            auto=auto,
            decision=decision,
            sampling=request.sampling,
            seed=request.seed,
            seeds=None if request.seeds is None else list(request.seeds),
            negative_prompt=request.negative_prompt,
            batch_size=decision.batch,
            buffers_bytes=buffers,
            lantern_accel=__version__,
            torch=torch.__version__,
        )
        return GenerationResult(images, sampled, stats, columns)


def steps_by_accepted(parts: Iterable[Decoded]) -> list[int]:
    """Return how many steps accepted 0, 1, ... drafts; parts may have drafted to other depths."""
    rows = [part.histogram.sum(0) for part in parts]
    totals: list[int] = pad_sequence(rows, batch_first=True).sum(0).tolist()
    return totals
