"""The distribution of a token, read off the processors that transformers built for a request.

Whatever a processor does that this decoder does not is refused by name: a token is sampled from the
distribution that was asked for, or not at all. transformers adds a top-k of 50 where nobody asks for
another; that is read off too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lantern_accel.errors import RequestError
from lantern_accel.strategy.rules import validate_model
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

#: The filters behind the constraint, in the usual order.
WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
#: What changes no token that we sample: an end comes after the last token, or not at all.
_HARMLESS = {
    "LogitNormalization": "normalises what is normalised",
    "InfNanRemoveLogitsProcessor": "numbers that are not finite are an error here",
}
_STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}


class Processor(Protocol):
    """Fields of transformers' processors; the class of one says which of them it has."""

    guidance_scale: float
    temperature: float
    top_k: int
    top_p: float
    filter_value: float
    _num_beams: int
    _prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]]


def refusal_of(what: str) -> RequestError:
    """Return the error for something that a request asks for and this decoder does not do."""
    return RequestError(
        f"the request asks for {what}, which lantern-accel does not do; leave it out, or call restore() "
        "for the library's own loop"
    )


def processors_of(
    model: Any, config: GenerationConfig, ids: Tensor, more: Iterable[Processor]
) -> LogitsProcessorList:
    """Return the processors that a model of transformers builds for prompts ``ids [B, length]``."""
    from transformers import LogitsProcessorList

    made: LogitsProcessorList = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(more),
        device=ids.device,
    )
    return made


def sampling_of(
    processors: Iterable[Processor], codes: int, *, sample: bool, scale: float = 1.0
) -> Sampling:
    """Return the settings that processors stand for; raises :class:`RequestError` for one that is
    unknown.

    ``codes``: how many a token is one of; ``scale``: guidance that was read elsewhere. Without ``sample``
    the highest logit is taken, whatever the filters.
    """
    values: dict[str, float | int | str] = {"cfg_scale": scale}
    seen: list[str] = []
    for one in processors:
        name = type(one).__name__
        if not type(one).__module__.startswith("transformers.") and name not in _HARMLESS:
            raise refusal_of(f"the logits processor {name}")
        if name in _HARMLESS:
            continue
        if name in (
            "ClassifierFreeGuidanceLogitsProcessor",
            "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        ):
            if seen:
                raise refusal_of(f"guidance after {seen[-1]}")
            if one.guidance_scale < 1:
                raise refusal_of(f"guidance_scale={one.guidance_scale}, below 1")
            values["cfg_scale"] = float(one.guidance_scale)
        elif name == "TemperatureLogitsWarper":
            values["temperature"] = float(one.temperature)
        elif name == "TopKLogitsWarper" and _cuts(one):
            values["top_k"] = 0 if one.top_k >= codes else int(one.top_k)
        elif name == "TopPLogitsWarper" and _cuts(one):
            values["top_p"] = float(one.top_p)
        else:
            raise refusal_of(f"the logits processor {name}")
        if name in WARPERS:
            seen.append(name)
    if not sample:
        return validate_model(
            Sampling, {"cfg_scale": values["cfg_scale"], "temperature": 0.0}, "sampling"
        )
    if len(set(seen)) < len(seen) or ("TemperatureLogitsWarper" in seen[1:]):
        raise refusal_of(f"logits processors in the order {', '.join(seen)}")
    if seen[-2:] == ["TopPLogitsWarper", "TopKLogitsWarper"]:
        values["order"] = "top_p_first"
    return validate_model(Sampling, values, "sampling")


def prompts_of(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the ids of prompts ``[B, length]`` without what ``mask`` leaves out."""
    return [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]


def negative_prompts(processors: Iterable[Processor], ids: Tensor) -> list[list[int]]:
    """Return the prompt that guidance leads away from for each of ``ids [B, length]``.

    As transformers has it: the last token where none was given.
    """
    given = next((one for one in processors if hasattr(one, "unconditional_context")), None)
    context = getattr(given, "unconditional_context", {})
    other, seen = context.get("input_ids"), context.get("attention_mask")
    other = ids[:, -1:] if other is None else other
    seen = torch.ones_like(other) if seen is None else seen
    return prompts_of(other.expand(len(ids), -1), seen.expand(len(ids), -1))


def _cuts(warper: Processor) -> bool:
    """Return whether a filter removes what it filters, and keeps one at least as ours does."""
    return warper.filter_value == -float("inf") and getattr(warper, "min_tokens_to_keep", 1) == 1


def check_stopping(criteria: Iterable[object]) -> None:
    """Raise :class:`RequestError` for a criterion that could end an image before its last token."""
    for one in criteria:
        if type(one).__name__ not in _STOPS:
            raise refusal_of(f"the stopping criterion {type(one).__name__}")


def check_outputs(config: GenerationConfig, *, whole: bool = False) -> None:
    """Raise :class:`RequestError` for what a generation config asks for besides tokens.

    ``whole``: the caller returns tokens in an output object too.
    """
    for name in (
        "return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
        "output_hidden_states",
    ):  # fmt: skip
        if getattr(config, name, False) and not (whole and name.startswith("return_dict")):
            raise refusal_of(f"{name}=True")
    if (getattr(config, "num_beams", 1) or 1) > 1:
        raise refusal_of(f"num_beams={config.num_beams}")
