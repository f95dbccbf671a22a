"""A loaded ``GlmImagePipeline`` whose prior decodes with lantern-accel; the call stays the same."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.families.glm_image.grids import grid_of, grids, prior_token_ids
from lantern_accel.families.releases import require
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.integrations.adapter import InterruptedDecodingError, Own, fresh_seeds
from lantern_accel.integrations.decoding import Accelerated
from lantern_accel.integrations.glm_image import sample_prior
from lantern_accel.integrations.transformers import decoder_of
from lantern_accel.integrations.transformers import restore as restore_model
from lantern_accel.strategy.values import Strategy

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

__all__ = ["accelerate", "prior_token_ids", "restore"]

#: Where a pipeline keeps a model of ours that decodes its prior, if any, and settings.
_STATE = "_lantern_accel"


def _adapter(
    pipe: GlmImagePipeline, own: Own | None, settings: dict[str, Any]
) -> Accelerated | Own:
    """Return what decodes a pipeline's prior now: a model of ours, or around the pipeline's module."""
    if own is not None:
        return own
    if pipe.vision_language_encoder is None:
        raise ModelError(
            "the pipeline was loaded without its prior (vision_language_encoder is None); name one: "
            "accelerate(pipe, prior=the folder of the release)"
        )
    return decoder_of(pipe.vision_language_encoder, **settings)


def accelerate(
    pipe: GlmImagePipeline,
    *,
    prior: str | Path | Pipeline | None = None,
    strategy: str | Strategy = "auto",
    **overrides: Any,
) -> GlmImagePipeline:
    """Let a ``GlmImagePipeline`` decode its prior with lantern-accel; returns the pipeline.

    Its call takes the same arguments. Of ``num_images_per_prompt`` images each has a prior of its
    own; the seed is the generator's, and torch's global randomness is not touched where there is
    one. The progress bar counts the prior's tokens first; setting ``pipe._interrupt`` while they
    are sampled raises :class:`InterruptedDecodingError`. ``prior``: a loaded pipeline of ours, or
    where its weights lie, for a pipeline that was loaded without
    (``vision_language_encoder=None``). ``overrides``: fields of :class:`Sampling`, such as
    ``temperature=0``, and ``head``, a draft head for the pipeline's own prior. ``pipe.restore()``
    undoes it. Generating from images stays the pipeline's own. Raises :class:`ModelError` for another
    pipeline, or an untested release.
    """
    require("diffusers")
    require("transformers")
    restore(pipe)
    kind: type = type(pipe)
    if kind.__name__ != "GlmImagePipeline":
        raise ModelError(f"{kind.__name__} cannot be accelerated; diffusers' GlmImagePipeline can")
    own = None
    if prior is not None:
        own = Own.on(prior, str(pipe._execution_device), strategy=strategy, **overrides)
        if own.pipeline.model.manifest.family != "glm_image":
            raise ModelError(f"the prior {prior} is not GLM-Image; name the folder of its release")
    state = own, {"strategy": strategy, **overrides}
    _adapter(pipe, *state)
    # A call looks its method up on the class, so the object gets another class.
    pipe.__class__ = _accelerated_class(kind)
    vars(pipe)[_STATE] = state
    return pipe


@functools.lru_cache(maxsize=8)
def _accelerated_class(kind: type) -> type:
    body = {"__call__": _call, "__reduce_ex__": _reduce, "restore": restore}
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**body, **about})


def _reduce(self: GlmImagePipeline, protocol: object) -> object:
    """Refuse a copy: no name leads to this class, and the decoder is of one pipeline."""
    raise ModelError(
        "an accelerated pipeline cannot be copied or pickled; call restore() first, and accelerate "
        "the copy"
    )


def restore(pipe: GlmImagePipeline) -> GlmImagePipeline:
    """Give a pipeline its own prior back, and free what was held next to it."""
    own, settings = vars(pipe).pop(_STATE, (None, None))
    if settings is not None:
        pipe.__class__ = type(pipe).__mro__[1]
        if own is not None:
            own.close()
        else:
            restore_model(pipe.vision_language_encoder)
    return pipe


@torch.no_grad()
def _call(self: GlmImagePipeline, *args: object, **kwargs: object) -> object:
    """Decode the prior with lantern-accel, then paint as the pipeline does."""
    own = type(self).__mro__[1].__call__
    # What its call does not take is refused before a prior is sampled.
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
        raise RequestError(f"num_images_per_prompt is {times!r}; give an integer of at least 1")
    each = [prompt] if isinstance(prompt, str) else prompt
    prompts = [one for one in each for _ in range(times)]
    generator = given["generator"]
    if isinstance(generator, list):
        if len(generator) != len(prompts):
            raise RequestError(
                f"there are {len(generator)} generators for {len(prompts)} images; give one, or one each"
            )
        seeds = [(one.initial_seed() % SEEDS, 0) for one in generator]
    elif generator is None:
        seeds = fresh_seeds(len(prompts))
    else:
        seeds = [(generator.initial_seed() % SEEDS, i) for i in range(len(prompts))]
    self._interrupt = False
    with self.progress_bar(total=sum(a * b for a, b in grids(rows, columns))) as bar:

        def report(known: int) -> None:
            if self._interrupt:
                raise InterruptedDecodingError("the prior was interrupted, so there is no image")
            bar.update(max(known - bar.n, 0) if hasattr(bar, "n") else 0)

        ours = _adapter(self, *vars(self)[_STATE])
        drawn = sample_prior(ours, self.processor, prompts, (width, height), seeds, report)
    ids = prior_token_ids(drawn.tokens, rows, columns)
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
