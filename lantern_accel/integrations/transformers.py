"""Models that transformers has loaded, decoding with lantern-accel.

``accelerate(model)`` replaces ``generate`` on a Janus and an Emu3; ``decode`` is a callable for
``model.generate(..., custom_generate=decode)`` of GLM-Image and Chameleon. Weights are shared with the
module where the layout is the same.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lantern_accel.device.context import own_context
from lantern_accel.errors import LanternWarning, ModelError, RequestError, StrategyError
from lantern_accel.families.chameleon import official as chameleon
from lantern_accel.families.emu3 import official as emu3
from lantern_accel.families.glm_image import official as glm_image
from lantern_accel.families.janus import official as janus
from lantern_accel.families.releases import require
from lantern_accel.integrations.adapter import fresh_seeds
from lantern_accel.integrations.decoding import Accelerated, Describe
from lantern_accel.integrations.distribution import (
    Processor,
    check_outputs,
    check_stopping,
    negative_prompts,
    processors_of,
    prompts_of,
    refusal_of,
    sampling_of,
)
from lantern_accel.integrations.emu3 import generate_ids
from lantern_accel.integrations.glm_image import sample_ids
from lantern_accel.models.locate import named_parts
from lantern_accel.strategy.values import Strategy

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerateDecoderOnlyOutput

JANUS, GLM = "JanusForConditionalGeneration", "GlmImageForConditionalGeneration"
EMU3 = ("Emu3ForConditionalGeneration", "Emu3ForCausalLM")
#: transformers' classes, with the family of each and how our model of it is described.
KINDS: dict[str, tuple[str, Describe]] = {
    JANUS: ("janus", janus.manifest_of),
    GLM: ("glm_image", glm_image.manifest_of),
    "ChameleonForConditionalGeneration": ("chameleon", chameleon.manifest_of_module),
    **dict.fromkeys(EMU3, ("emu3", emu3.manifest_of)),
}
#: Where a module keeps our decoder of it, so that both are freed together.
_OURS = "_lantern_accel"


def decoder_of(
    model: nn.Module, strategy: str | Strategy = "auto", head: str | Path | None = None,
    **overrides: object,
) -> Accelerated:  # fmt: skip
    """Return our decoder around a loaded model, the same for every call; nothing is made yet.

    ``head``: the file or folder of a draft head for these weights; ``overrides``: fields of
    :class:`Sampling` that win over what requests ask for. Raises :class:`ModelError` for a class that is
    unknown, for an untested release, or a path that is not there.
    """
    require("transformers")
    name = type(model).__name__
    if name not in KINDS:
        raise ModelError(
            f"{name} cannot be accelerated; transformers' classes that can be are {', '.join(KINDS)}, "
            "without an adapter (merge_and_unload())"
        )
    given = named_parts(head=head).head
    family, describe = KINDS[name]
    made = Accelerated(module=model, family=family, describe=describe)
    ours: Accelerated = vars(model).setdefault(_OURS, made)
    if ours.head != given:  # what was made is without it
        ours.close()
    ours.strategy, ours.overrides, ours.head = strategy, overrides, given
    return ours


# --- Janus ------------------------------------------------------------------------------------------


def accelerate(model: nn.Module, strategy: str | Strategy = "auto", **overrides: Any) -> nn.Module:
    """Let ``generate`` of a Janus or an Emu3 decode images with lantern-accel.

    Those are ``generation_mode="image"`` of a Janus, and prompts of an Emu3 that end where an image
    starts. Everything else of ``generate`` stays the model's own, and so does every argument. An image
    of Emu3 that cannot be decoded here is the model's own too, with a warning. Returns the model;
    ``model.restore()`` undoes it. ``strategy``, ``head`` and
    ``overrides``: see :func:`decoder_of`.
    """
    ours = decoder_of(model, strategy, **overrides)
    kind: Any = type(model)
    if kind.__name__ not in (JANUS, *EMU3):
        raise ModelError(
            f"{kind.__name__} takes lantern-accel as a callable: "
            "model.generate(..., custom_generate=lantern_accel.integrations.transformers.decode)"
        )
    image = _generate_emu3 if kind.__name__ in EMU3 else _generate_janus
    plain = functools.partial(kind.generate, model)
    vars(model)["generate"] = functools.partial(image, ours, plain)
    vars(model)["restore"] = functools.partial(restore, model)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Give a model its own ``generate`` back, and free what was held next to it."""
    made: Accelerated | None = vars(model).pop(_OURS, None)
    if vars(model).pop("restore", None) is not None:
        del vars(model)["generate"]
    if made is not None:
        made.close()
    return model


def _generate_janus(
    ours: Accelerated,
    plain: Callable[..., object],
    inputs: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_processor: list[Processor] | None = None,
    generation_mode: str = "text",
    **kwargs: Any,
) -> object:
    """Stand for ``JanusForConditionalGeneration.generate``: 576 codes an image, int64 ``[B, 576]``."""
    given = inputs, attention_mask, logits_processor
    if generation_mode != "image":
        return plain(*given, generation_mode=generation_mode, **kwargs)
    with torch.no_grad(), own_context():
        return _janus_tokens(ours, *given, **kwargs)


def _janus_tokens(
    ours: Accelerated, inputs: Tensor | None, attention_mask: Tensor | None,
    logits_processor: list[Processor] | None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    model: Any = ours.module
    if kwargs.pop("streamer", None) is not None:
        raise refusal_of("a streamer")
    check_stopping(kwargs.pop("stopping_criteria", None) or ())
    config, more = model._prepare_generation_config(kwargs.pop("generation_config", None), **kwargs)
    ids = inputs if inputs is not None else more.pop("input_ids", None)
    more.pop("input_ids", None)
    more.pop("use_cache", None)
    if ids is None or ids.dim() != 2:
        raise RequestError(
            "the prompt must be token ids [batch, length], as the processor gives them"
        )
    if more:
        raise refusal_of(", ".join(f"{name}=" for name in more))
    check_outputs(config)
    scale = 5.0 if config.guidance_scale is None else float(config.guidance_scale)
    config.guidance_scale = None
    processors = processors_of(model, config, ids, logits_processor or [])
    codes = ours.ready().model.manifest.target.vocab_size
    found = sampling_of(processors, codes, sample=bool(config.do_sample), scale=scale)
    sampling = ours.sampling(found)
    times = config.num_return_sequences or 1
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    ids, mask = (one.repeat_interleave(times, dim=0) for one in (ids, mask))
    # A prompt for an image ends with the token that starts it, whether or not the config names it.
    start = (getattr(config, "generation_kwargs", None) or {}).get("boi_token_id", ids[:, -1:])
    keep = (ids == config.bos_token_id) | (ids == start)
    other = torch.where(keep, ids, config.pad_token_id)
    prompts, away = prompts_of(ids, mask), prompts_of(other, mask)
    return ours.generate_ids(prompts, sampling, fresh_seeds(len(ids)), others=away).tokens.to(ids)


def _generate_emu3(
    ours: Accelerated, plain: Callable[..., object], inputs: Tensor | None = None, **kwargs: Any
) -> object:
    """Stand for ``generate`` of an Emu3: prompts that end where an image starts are decoded here."""
    ids = kwargs.get("input_ids") if inputs is None else inputs
    config: Any = ours.module.config
    named = {name: getattr(config, name, None) for name in ("vocabulary_map", "pad_token_id")}
    start = emu3.special_ids(named).image
    if ids is None or ids.dim() != 2 or bool((ids[:, -1] != start).any()):
        return plain(inputs, **kwargs)
    try:
        for name in ("streamer", "assistant_model", "custom_generate"):
            if kwargs.get(name) is not None:
                raise refusal_of(f"{name}=")
        return plain(inputs, **kwargs, custom_generate=decode)
    except (RequestError, StrategyError) as error:
        text = f"transformers decodes this image itself: {error}"
        warnings.warn(text, LanternWarning, stacklevel=2)
    return plain(inputs, **kwargs)


# --- callables --------------------------------------------------------------------------------------


@own_context()
def decode(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: Sequence[Processor] | None,
    stopping_criteria: Sequence[object] | None,
    generation_config: GenerationConfig,
    image_grid_thw: Tensor | None = None,
    images_per_sample: Tensor | None = None,
    **model_kwargs: Tensor | None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Sample an image's tokens; for ``model.generate(..., custom_generate=decode)``.

    Returns prompt and tokens, int64 ``[B, prompt + N]``, in a ``GenerateDecoderOnlyOutput`` where the
    request asks for one. GLM-Image: the distribution is the one that transformers built, over codes
    alone. Emu3: what ``prefix_allowed_tokens_fn`` leaves of that one. Chameleon: the prompt ends where
    the image starts, and only image tokens are sampled. Raises :class:`RequestError` for what the
    request asks for and this decoder does not do.
    """
    known: Accelerated | None = vars(model).get(_OURS)
    ours = decoder_of(model) if known is None else known
    whole = generation_config.return_dict_in_generate
    check_outputs(generation_config, whole=True)
    check_stopping(stopping_criteria or ())
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if model_kwargs.get("pixel_values") is not None:
        raise refusal_of("images as input")
    seeds, given = fresh_seeds(len(input_ids)), logits_processor or ()
    if type(model).__name__ in EMU3:
        tokens = generate_ids(ours, input_ids, mask, given, generation_config, seeds)
    else:
        manifest = ours.ready().model.manifest
        target = manifest.target
        sample, width = (
            bool(generation_config.do_sample),
            getattr(target, "head_rows", target.vocab_size),
        )
        sampling = ours.sampling(sampling_of(given, width, sample=sample))
        if type(model).__name__ == GLM:
            tokens = sample_ids(ours, input_ids, mask, image_grid_thw, sampling, seeds).tokens
        else:
            start = manifest.ids.image_start
            if bool((input_ids[:, -1] != start).any()):
                raise RequestError(
                    f"a prompt does not end with the token {start}, where an image starts; add it"
                )
            prompts, away = prompts_of(input_ids, mask), negative_prompts(given, input_ids)
            codes = ours.generate_ids(prompts, sampling, seeds, others=away).tokens
            tokens = torch.tensor(manifest.target.token_ids())[codes]
    out = torch.cat((input_ids, tokens.to(input_ids)), dim=1)
    out = out[:, : getattr(generation_config, "max_length", None) or out.shape[1]]
    if not whole:
        return out
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", out))
