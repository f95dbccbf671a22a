"""The body of an images request: OpenAI's fields and ours, checked before anything is queued."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import LanternError, RequestError, StrategyError, shown
from lantern_accel.generation.request import build_request
from lantern_accel.generation.settings import read_size
from lantern_accel.serving.refusals import Refusal, check_model, wrong
from lantern_accel.strategy.values import Sampling, Strategy

#: Sizes that clients send where their user chose none: mapped to the model's own, and said so.
CLIENT_SIZES = ("512x512", "1024x1024")
#: Formats of pictures by OpenAI's names, and Pillow's.
FORMATS = {"png": "PNG", "webp": "WEBP", "jpeg": "JPEG"}
#: Seeds that OpenAI's clients and JSON of other languages carry without loss.
DRAWN_SEEDS = 2**31
#: Fields of other servers and clients that mean nothing here, however near to ours their names are.
FOREIGN = frozenset(
    (
        # OpenAI's
        *("style", "user", "safety_identifier", "complexity", "frame_count", "frame_duration_ms"),
        *("svg",),
        # diffusion servers'
        *("num_inference_steps", "true_cfg_scale", "flow_shift", "generator_device", "lora"),
        *("extra_params", "layers", "bot_task", "system_prompt", "return_stage_metrics", "steps"),
        *("vae_use_slicing", "vae_use_tiling", "width", "height", "max_sequence_length"),
        *("diffusers_kwargs", "enhance_prompt", "perf_dump_path", "guidance_scale_2"),
    )
)
#: This near to one of ours a name is a slip.
NEAR = 0.75


class Body(BaseModel):
    """What ``POST /v1/images/generations`` takes; other fields are ignored and named in the answer."""

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: StrictStr | StrictInt
    model: StrictStr | None = None
    n: int = Field(1, ge=1, le=10, strict=True)
    size: StrictStr | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] = "auto"
    background: Literal["opaque", "auto"] | None = None
    moderation: Literal["low", "auto"] | None = None
    output_format: Literal["png", "webp", "jpeg"] = "png"
    output_compression: int = Field(100, ge=0, le=100, strict=True)
    response_format: Literal["b64_json"] | None = None
    stream: StrictBool = False
    partial_images: int = Field(0, ge=0, le=3, strict=True)
    # Beyond OpenAI's.
    seed: StrictInt | list[StrictInt] | None = None
    strategy: StrictStr | None = None
    relaxed: StrictBool | None = None
    tv_budget: float | None = None
    temperature: float | None = None
    guidance_scale: float | None = None
    negative_prompt: StrictStr | None = None

    @field_validator("*", mode="wrap")
    @classmethod
    def _null_is_the_default(cls, value: Any, read: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        return field.default if value is None and not field.is_required() else read(value)


#: What a field takes, for its error.
TAKES = {
    "prompt": "text, or a class id for a model of classes",
    "n": "1 to 10 images",
    "size": "'auto' or WIDTHxHEIGHT",
    "background": "'opaque' or 'auto': pictures have no transparency",
    "output_format": "'png', 'webp' or 'jpeg'",
    "output_compression": "0 to 100",
    "response_format": "'b64_json': this server keeps no files to give URLs of",
    "partial_images": "0 to 3",
    "seed": "a whole number from 0, or a list with one for each image",
}


@dataclass(frozen=True)
class ImageRequest:
    """One request, complete: what to draw, with which seeds, and how to answer.

    ``seeds``: of each image its seed and its index below that seed. ``size``: in pixels, None for the
    model's own. ``notes``: what was changed; ``ignored``: fields that mean nothing here.
    ``ids, grid``: the prompt as token ids, and the rows and columns of tokens; no picture is made then.
    """

    body: Body
    strategy: Strategy
    sampling: Sampling
    seeds: tuple[tuple[int, int], ...]
    size: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ids: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None


def read_body(
    given: object, manifest: Any, picture: Callable[[Any], tuple[int, int]], most_prompt: int
) -> ImageRequest:
    """Check a request's JSON; raises :class:`Refusal` with the field that is wrong.

    ``picture`` returns what the model draws for a size, or raises; ``most_prompt``: characters.
    """
    if not isinstance(given, dict):
        raise wrong(None, "the body is no JSON object; send one such as {'prompt': 'red heart'}")
    ignored = _ignored(given)
    try:
        body = Body.model_validate(given)
    except ValidationError as error:
        raise _refused(error, given) from None
    if body.model is not None:
        check_model(body.model, manifest.name)
    for name in ("prompt", "negative_prompt"):
        text = getattr(body, name)
        if isinstance(text, str) and len(text) > most_prompt:
            raise wrong(
                name, f"the {name} has {len(text)} characters; at most {most_prompt} are read"
            )
    size, notes = _size(body.size, manifest, picture)
    settings = {
        "strategy": body.strategy,
        "relaxed": body.relaxed,
        "tv_budget": body.tv_budget,
        "temperature": body.temperature,
        "cfg_scale": body.guidance_scale,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        request = build_request(manifest, body.prompt, settings, lambda strategy, _: strategy)
    except LanternError as error:
        raise wrong(_blamed(error, settings), str(error)) from None
    return ImageRequest(
        body,
        strategy=request.strategy,
        sampling=request.sampling,
        seeds=_seeds(body),
        size=size,
        ignored=ignored,
        notes=notes,
    )


def _ignored(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that mean nothing here; raises where one is nearly one of ours."""
    unknown = [name for name in given if name not in Body.model_fields]
    for name in unknown:
        if name in FOREIGN:
            continue
        near = difflib.get_close_matches(name[:80].lower(), Body.model_fields, n=1, cutoff=NEAR)
        if near:
            text = f"there is no field {shown(name)}; did you mean {near[0]}?"
            raise wrong(name[:80], text, "unknown_parameter")
    return tuple(name[:80] for name in unknown[:32])


def _refused(error: ValidationError, given: Mapping[str, Any]) -> Refusal:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "body"
    if first["type"] == "missing":
        text = f"the field {name} is missing; it takes {TAKES.get(name, 'a value')}"
        return wrong(name, text, "missing_required_parameter")
    said = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    text = f"{name} cannot be {shown(given.get(name))}; it takes {TAKES.get(name, said)}"
    return wrong(name, text)


def _size(
    text: str | None, manifest: Any, picture: Callable[[Any], tuple[int, int]]
) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    if text is None or text == "auto":
        return None, ()
    try:
        asked = read_size(text)
    except RequestError as error:
        raise wrong("size", str(error)) from None
    try:
        picture(asked)
        return asked, ()
    except RequestError as error:
        if text not in CLIENT_SIZES:
            raise wrong("size", f"{error} (or send 'auto')") from None
    width, height = picture(None)
    note = (
        f"size {text}, which clients send unasked, was taken for the model's own {width}x{height}"
    )
    return None, (note,)


def _seeds(body: Body) -> tuple[tuple[int, int], ...]:
    if isinstance(body.seed, list):
        if len(body.seed) != body.n:
            raise wrong(
                "seed", f"there are {len(body.seed)} seeds for {body.n} images; send one for each"
            )
        found = tuple((seed, 0) for seed in body.seed)
    else:
        seed = secrets.randbelow(DRAWN_SEEDS) if body.seed is None else body.seed
        found = tuple((seed, index) for index in range(body.n))
    for seed, _ in found:
        if not 0 <= seed < SEEDS:
            raise wrong("seed", f"seed cannot be {shown(seed)}; it takes 0 to {SEEDS - 1}")
    return found


def _blamed(error: LanternError, settings: Mapping[str, Any]) -> str | None:
    """Return the field that a message speaks of, where it is one of those that were sent."""
    names = {"cfg_scale": "guidance_scale"}
    for name in settings:
        if name in str(error) or repr(settings[name]) in str(error):
            return names.get(name, name)
    if isinstance(error, StrategyError) and "strategy" in settings:
        return "strategy"
    return "prompt" if "prompt" in str(error) else None
