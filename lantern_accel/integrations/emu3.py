"""Images of Emu3 from the prompts and the grammar that a request to transformers has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_accel.errors import RequestError
from lantern_accel.families.base import Rows
from lantern_accel.families.emu3.model import Emu3Manifest
from lantern_accel.integrations.decoding import Accelerated
from lantern_accel.integrations.distribution import (
    WARPERS,
    negative_prompts,
    prompts_of,
    refusal_of,
    sampling_of,
)

#: transformers' processor of ``prefix_allowed_tokens_fn``.
_GRAMMAR = "PrefixConstrainedLogitsProcessor"
#: Stands for all codes, where an id stands for itself alone.
_CODES = -1


def draw_image(
    ours: Accelerated,
    ids: Tensor,
    mask: Tensor,
    processors: Sequence[Any],
    config: Any,
    seeds: Sequence[tuple[int, int]],
) -> Tensor:
    """Return the ids of images and of their ends, int64 ``[B, N]``, behind prompts ``ids [B, length]``.

    ``config``: the request's generation config. Raises :class:`RequestError` for what is not an image of
    one size, and for a distribution or an end that is not this decoder's.
    """
    pipeline = ours.ready()
    model: Any = pipeline.model
    manifest: Emu3Manifest = model.manifest
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
    grid = _grid_of(processors[at], ids, manifest)
    contexts = prompts_of(ids, mask)
    if sampling.branches == 2:
        contexts += negative_prompts(others, ids)
    made = model.family.conditions_of(model, contexts, pipeline.backend.device, grid)
    rows = Rows(made.condition, made.mask)
    tokens = ours.draw(pipeline, rows, made.shape, sampling, seeds).tokens
    out = manifest.ids_of(tokens)
    stops = torch.as_tensor(-1 if config.eos_token_id is None else config.eos_token_id).flatten()
    ended = torch.isin(out[0, -3:], stops)
    if not ended.any() and (config.max_length or 0) > ids.shape[1] + out.shape[1]:
        raise refusal_of("an image that no eos_token_id ends")
    return out[:, : out.shape[1] - 2 + int(ended.byte().argmax())] if ended.any() else out


def _grid_of(grammar: Any, ids: Tensor, manifest: Emu3Manifest) -> tuple[int, int]:
    """Return rows and columns of the images that a grammar allows behind ``ids [B, length]``.

    It is called at every place of an image before anything is drawn. Raises :class:`RequestError` where
    it allows something else than Emu3's images of one size.
    """
    special, target = manifest.ids, manifest.target
    codes = torch.arange(target.image_first, target.image_first + target.image_codes)
    ends = [special.frame_end, special.image_end, special.eos]
    sizes = set[tuple[int, int]]()
    for row, prompt in enumerate(ids):
        written = torch.cat((prompt, prompt.new_full((target.max_positions,), special.first)))
        kinds: list[int] = []
        all_codes = None
        while len(kinds) < target.max_positions and kinds[-1:] != ends[-1:]:
            place = len(prompt) + len(kinds)
            given = grammar._prefix_allowed_tokens_fn(row // grammar._num_beams, written[:place])
            if given is not all_codes:
                asked = torch.as_tensor(given).flatten().cpu()
                if len(asked) == 1:
                    kinds.append(int(asked))
                    written[place] = asked[0]
                    continue
                if not torch.equal(asked.sort().values, codes):
                    break
                all_codes = given
            kinds.append(_CODES)
        rows, columns = (
            kinds.count(special.row_end),
            (*kinds, special.row_end).index(special.row_end),
        )
        if kinds != [*([_CODES] * columns + [special.row_end]) * rows, *ends] or not rows * columns:
            raise refusal_of(
                f"a prefix_allowed_tokens_fn that is not Emu3's at token {len(kinds)} of the image"
            )
        sizes.add((rows, columns))
    if len(sizes) > 1:
        raise refusal_of("images of several sizes in one batch")
    return sizes.pop()
