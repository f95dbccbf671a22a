"""``POST /generate``: ids in, ids out, as SGLang's option ``--srt-encoder-url`` asks an external server.

Its GLM-Image head tokenises prompts itself, sends one request per image or lists of them, and paints from
what comes back: the small grid's tokens, then the large one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import LanternError
from lantern_accel.generation.request import build_request
from lantern_accel.records import first_wrong
from lantern_accel.serving.body import Body, ImageRequest
from lantern_accel.serving.refusals import quote, wrong_value
from lantern_accel.serving.studio import Completed, Finished

#: What the head's own requests default to, where it names no seed.
USUAL_SEED = 42
#: Prompts of one request.
MOST = 64


class SamplingParams(BaseModel):
    """The settings that mean something here; others, such as stop words, are left out of account."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    sampling_seed: StrictInt | None = Field(None, ge=0, lt=SEEDS)


class Picture(BaseModel):
    """The grids of one picture as ``[time, rows, columns]``, the large one first."""

    model_config = ConfigDict(extra="allow")

    image_grid_thw: list[tuple[StrictInt, StrictInt, StrictInt]] = Field(min_length=1)


def read_generate(
    given: object, family: Any, manifest: Any, most_ids: int
) -> tuple[list[ImageRequest], bool]:
    """Return the requests of a body, and whether it was a list; raises :class:`Refusal`.

    ``most_ids``: token ids of one prompt.
    """
    if not hasattr(family, "conditions_of"):
        raise wrong_value(
            None,
            f"the model {manifest.name!r} takes no prompts as ids; POST /v1/images/generations draws "
            "with it",
            "not_supported",
        )
    if not isinstance(given, dict):
        raise wrong_value(None, "the body is not a JSON object; send one with input_ids")
    ids = given.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise wrong_value(
            "input_ids", "input_ids is missing; send token ids, or a list of lists of them"
        )
    several = isinstance(ids[0], list)
    every = ids if several else [ids]
    if len(every) > MOST:
        raise wrong_value(
            "input_ids", f"there are {len(every)} prompts in one request; send {MOST} at most"
        )
    pictures = _each("image_data", given.get("image_data"), len(every), several)
    params = _each("sampling_params", given.get("sampling_params"), len(every), several)
    return [
        _request(*one, manifest, most_ids) for one in zip(every, pictures, params, strict=True)
    ], several


def _each(name: str, given: Any, count: int, several: bool) -> list[Any]:
    """Return what a key says for each prompt: one thing for all, or a list of as many."""
    if not (several and isinstance(given, list)):
        return [given] * count
    if len(given) != count:
        raise wrong_value(
            name, f"{name} has {len(given)} entries for {count} prompts; send one for each"
        )
    return given


def _request(ids: Any, picture: Any, params: Any, manifest: Any, most_ids: int) -> ImageRequest:
    table = int(getattr(manifest.target, "token_count", 0) or manifest.target.vocab_size)
    good = isinstance(ids, list) and all(type(one) is int and 0 <= one < table for one in ids)
    if not good or not ids:
        raise wrong_value(
            "input_ids", f"{quote(ids)} are not token ids of this model, 0 to {table - 1}"
        )
    if len(ids) > most_ids:
        raise wrong_value("input_ids", f"a prompt has {len(ids)} ids; at most {most_ids} are read")
    try:
        # One picture, or a list of one, as the head sends it.
        grids = Picture.model_validate(picture[0] if isinstance(picture, list) else picture)
        _, rows, columns = grids.image_grid_thw[0]
    except (ValidationError, IndexError):
        raise wrong_value(
            "image_data",
            "image_data is to hold image_grid_thw, [[1, rows, columns], ...], large first",
        ) from None
    try:
        read = SamplingParams.model_validate(params or {})
        settings = read.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        if settings.get("top_k") == -1:  # all of them, as this client's servers write it
            settings["top_k"] = 0
        request = build_request(manifest, "ids", settings, lambda strategy, _: strategy)
    except ValidationError as error:
        raise wrong_value("sampling_params", f"sampling_params: {first_wrong(error)}") from None
    except LanternError as error:
        raise wrong_value("sampling_params", str(error)) from None
    seed = USUAL_SEED if read.sampling_seed is None else read.sampling_seed
    return ImageRequest(
        Body(prompt="ids"),
        strategy=request.strategy,
        sampling=request.sampling,
        seeds=((seed, 0),),
        ids=tuple(ids),
        grid=(rows, columns),
    )


def answer(
    request: ImageRequest, done: Sequence[Finished], used: Completed, codes: int
) -> dict[str, Any]:
    """Return the ids of one prompt, and of what distribution they are.

    ``codes``: ids below this are drawn; filters count the others too, before they are taken out.
    """
    tokens = done[0].drawn.decoded.tokens[0].tolist()
    prompt = len(request.ids or ())
    sampling = request.sampling
    return {
        "output_ids": tokens,
        "meta_info": {
            "prompt_tokens": prompt,
            "completion_tokens": len(tokens),
            "reasoning_tokens": 0,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": len(tokens)},
            "distribution": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "ids_below": codes,
                "exact": not used.strategy.acceptance.relaxed and not used.rounding,
            },
            "sampling_seed": request.seeds[0][0],
            "e2e_latency": used.seconds + used.waited,
        },
    }
