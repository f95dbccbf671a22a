"""Images of Emu3 from the prompts and the grammar that a request to transformers has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_accel.errors import RequestError
from lantern_accel.families.emu3.grammar import grid_of_grammar
from lantern_accel.integrations.decoding import Accelerated
from lantern_accel.integrations.distribution import (
    WARPERS,
    Processor,
    negative_prompts,
    prompts_of,
    refusal_of,
    sampling_of,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

#: transformers' processor of ``prefix_allowed_tokens_fn``.
_GRAMMAR = "PrefixConstrainedLogitsProcessor"


def generate_ids(
    ours: Accelerated,
    ids: Tensor,
    mask: Tensor,
    processors: Sequence[Processor],
    config: GenerationConfig,
    seeds: Sequence[tuple[int, int]],
) -> Tensor:
    """Return the ids of images and of their ends, int64 ``[B, N]``, behind prompts ``ids [B, length]``.

    ``config``: the request's generation config. Raises :class:`RequestError` for what is not an image of
    one size, and for a distribution or an end that is not this decoder's.
    """
    manifest = ours.ready().model.manifest
    names = [type(one).__name__ for one in processors]
    if names.count(_GRAMMAR) != 1:
        raise RequestError(
            "the request has no prefix_allowed_tokens_fn, which says where the image's rows end; give "
            "the one of the model's documentation"
        )
    at = names.index(_GRAMMAR)
    if set(names[:at]) & set(WARPERS):
        raise refusal_of("a filter before prefix_allowed_tokens_fn")
    others = [*processors[:at], *processors[at + 1 :]]
    codes = manifest.target.image_codes
    sampling = ours.sampling(sampling_of(others, codes, sample=bool(config.do_sample)))
    beams = processors[at]._num_beams
    asked = processors[at]._prefix_allowed_tokens_fn
    try:
        grid = grid_of_grammar(lambda row, before: asked(row // beams, before), ids, manifest)
    except ValueError as error:
        raise refusal_of(str(error)) from None
    prompts, away = prompts_of(ids, mask), negative_prompts(others, ids)
    made = ours.generate_ids(prompts, sampling, seeds, others=away, grid=grid)
    out: Tensor = manifest.ids_of(made.tokens)
    stops = torch.as_tensor(-1 if config.eos_token_id is None else config.eos_token_id).flatten()
    ended = torch.isin(out[0, -3:], stops)
    if not ended.any() and (config.max_length or 0) > ids.shape[1] + out.shape[1]:
        raise refusal_of("an image that no eos_token_id ends")
    return out[:, : out.shape[1] - 2 + int(ended.byte().argmax())] if ended.any() else out
