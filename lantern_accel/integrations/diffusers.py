"""A loaded ``GlmImagePipeline`` whose prior decodes with lantern-accel; the call stays the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_accel.errors import ModelError, RequestError
from lantern_accel.families.controls import Controls
from lantern_accel.families.glm_image.grids import grid_of, grids, prior_token_ids
from lantern_accel.families.glm_image.painting import check_scheduler
from lantern_accel.families.releases import require
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.integrations.decoding import (
    Accelerated,
    InterruptedDecodingError,
    draw,
    fresh_seeds,
)
from lantern_accel.integrations.distribution import processors_of, sampling_of
from lantern_accel.integrations.transformers import accelerated, glm_tokens
from lantern_accel.integrations.transformers import restore as restore_model
from lantern_accel.strategy.values import Strategy

__all__ = ["accelerate", "prior_token_ids", "restore"]

_STATE = "_lantern_accel"


class _Prior:
    """What draws the prior of one pipeline: its own module's weights, or a model of ours."""

    def __init__(
        self, pipe: Any, prior: Any, strategy: str | Strategy, overrides: dict[str, Any]
    ) -> None:
        self.pipe, self.strategy, self.overrides = pipe, strategy, overrides
        self.own: Pipeline | None = None
        self.opened = False
        self.inner: Any = None
        if prior is None:
            if pipe.vision_language_encoder is None:
                raise ModelError(
                    "the pipeline was loaded without its prior (vision_language_encoder is None); name "
                    "one: accelerate(pipe, prior=the folder of the release)"
                )
            self._around(pipe.vision_language_encoder)
        elif isinstance(prior, Pipeline):
            self.own = prior
        else:
            from lantern_accel.api import load

            self.own, self.opened = load(prior, device=str(pipe._execution_device)), True
        if self.own is not None and self.own.model.manifest.family != "glm_image":
            raise ModelError(f"the prior {prior} is not GLM-Image; name the folder of its release")

    def tokens(
        self,
        prompts: Sequence[str],
        height: int,
        width: int,
        seeds: list[tuple[int, int]],
        report: Callable[[int], None],
    ) -> Tensor:
        """Return the codes of both grids, ``[B, N]``."""
        tokenizer = getattr(self.pipe.processor, "tokenizer", None)
        reads = getattr(tokenizer, "backend_tokenizer", None)
        if reads is not None:  # else our own prior's tokenizer is asked, below
            Controls(reads).check(prompts)
        if self.own is not None:
            made = self.own.conditions(prompts, (width, height))
            sampling = self.own.sampling(**self.overrides)
            rows = self.own.model.family.rows(self.own.model, made, sampling)
            return draw(self.own, rows, made.shape, self.strategy, sampling, seeds, report)
        inner = self.pipe.vision_language_encoder
        given = self.pipe.processor.apply_chat_template(
            [[{"role": "user", "content": [{"type": "text", "text": one}]}] for one in prompts],
            tokenize=True,
            padding=len(prompts) > 1,
            target_h=height,
            target_w=width,
            return_dict=True,
            return_tensors="pt",
        )
        ours = self._around(inner)
        pipeline = ours.ready()
        ids, mask, shapes = (given[n] for n in ("input_ids", "attention_mask", "image_grid_thw"))
        # What generate(do_sample=True) of the pipeline's own prior would draw by.
        config, _ = inner._prepare_generation_config(None, do_sample=True)
        processors = processors_of(inner, config, ids, [])
        codes = pipeline.model.manifest.target.head_rows
        sampling = ours.sampling(sampling_of(processors, codes, sample=True))
        return glm_tokens(ours, pipeline, ids, mask, shapes, sampling, seeds, report)

    def _around(self, inner: Any) -> Accelerated:
        """Return our decoder around the pipeline's prior, and let go of one that was there before."""
        ours = accelerated(inner, self.strategy, **self.overrides)
        if self.inner is not None and self.inner is not inner:
            restore_model(self.inner)
        self.inner = inner
        return ours

    def __getstate__(self) -> dict[str, Any]:
        if self.own is not None:
            raise ModelError(
                "a pipeline that takes its prior from lantern-accel cannot be copied or saved; call "
                "restore() first, and accelerate the copy"
            )
        return vars(self)

    def close(self) -> None:
        """Free what is held next to the pipeline's own modules."""
        if self.own is None:
            restore_model(self.inner)
        elif self.opened:
            self.own.close()


def accelerate(
    pipe: Any, *, prior: Any = None, strategy: str | Strategy = "auto", **overrides: Any
) -> Any:
    """Let a ``GlmImagePipeline`` draw its prior with lantern-accel; returns the pipeline.

    Its call takes the same arguments. Of ``num_images_per_prompt`` images each has a prior of its
    own; the seed is the generator's, and torch's global randomness is not touched where there is
    one. The progress bar counts the prior's tokens first; setting ``pipe._interrupt`` while they
    are drawn raises :class:`InterruptedDecodingError`. ``prior``: a loaded pipeline of ours, or
    where its weights lie, for a pipeline that was loaded without
    (``vision_language_encoder=None``). ``overrides``: fields of :class:`Sampling`, such as
    ``temperature=0``. ``pipe.restore()`` undoes it. Drawing from pictures stays the pipeline's own.
    Raises :class:`ModelError` for another pipeline, an untested release, or one whose scheduler paints
    wrong pictures.
    """
    require("diffusers")
    require("transformers")
    restore(pipe)
    kind: Any = type(pipe)
    if kind.__name__ != "GlmImagePipeline":
        raise ModelError(f"{kind.__name__} cannot be accelerated; diffusers' GlmImagePipeline can")
    check_scheduler(pipe.scheduler)
    state = _Prior(pipe, prior, strategy, overrides)
    # A call looks its method up on the class, so the object gets another class.
    pipe.__class__ = _accelerated_class(kind)
    vars(pipe)[_STATE] = state
    return pipe


@functools.lru_cache(maxsize=8)
def _accelerated_class(kind: type) -> type:
    body = {"__call__": _call, "__reduce_ex__": _reduce, "restore": restore}
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**body, **about})


def _reduce(self: Any, protocol: object) -> Any:
    """Say how a copy is made: no name leads to this class, so that it is made of the library's."""
    return _copy_of, (type(self).__mro__[1],), vars(self)


def _copy_of(kind: Any) -> Any:
    made: Any = _accelerated_class(kind)
    return made.__new__(made)


def restore(pipe: Any) -> Any:
    """Give a pipeline its own prior back, and free what was held next to it."""
    state = vars(pipe).pop(_STATE, None)
    if state is not None:
        pipe.__class__ = type(pipe).__mro__[1]
        state.close()
    return pipe


@torch.no_grad()
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw the prior with lantern-accel, then paint as the pipeline does."""
    own = type(self).__mro__[1].__call__
    # What its call does not take is refused before a prior is drawn.
    asked = inspect.signature(own).bind(self, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    given.pop("self")
    prompt, height, width = (given[name] for name in ("prompt", "height", "width"))
    if given["image"] is not None or given["prior_token_ids"] is not None or prompt is None:
        return own(self, **given)
    tensors = given["callback_on_step_end_tensor_inputs"]
    self.check_inputs(prompt, height, width, tensors, given["prompt_embeds"])
    if height is None or width is None:
        raise RequestError("height and width must be given, in multiples of 32 pixels")
    rows, columns = grid_of(width, height, "the prior")
    times = given["num_images_per_prompt"]
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise RequestError(f"num_images_per_prompt is {times!r}; give a whole number of at least 1")
    each = [prompt] if isinstance(prompt, str) else prompt
    prompts = [one for one in each for _ in range(times)]
    generator = given["generator"]
    if isinstance(generator, list):
        if len(generator) != len(prompts):
            raise RequestError(
                f"there are {len(generator)} generators for {len(prompts)} images; give one, or one each"
            )
        seeds = [(_seed_from(one), 0) for one in generator]
    elif generator is None:
        seeds = fresh_seeds(len(prompts))
    else:
        seeds = [(_seed_from(generator), i) for i in range(len(prompts))]
    self._interrupt = False
    state: _Prior = vars(self)[_STATE]
    with self.progress_bar(total=sum(a * b for a, b in grids(rows, columns))) as bar:

        def report(known: int) -> None:
            if self._interrupt:
                raise InterruptedDecodingError("the prior was interrupted, so there is no picture")
            bar.update(max(known - bar.n, 0) if hasattr(bar, "n") else 0)

        tokens = state.tokens(prompts, height, width, seeds, report)
    ids = prior_token_ids(tokens, rows, columns)
    negative = given["negative_prompt_embeds"]
    if negative is not None and times > 1:
        negative = negative.repeat_interleave(times, dim=0)
    given |= {
        "prompt": prompts,
        "num_images_per_prompt": 1,
        "prior_token_ids": ids.to(self._execution_device),
        "negative_prompt_embeds": negative,
    }
    return own(self, **given)


def _seed_from(generator: torch.Generator) -> int:
    return generator.initial_seed() % 2**63
