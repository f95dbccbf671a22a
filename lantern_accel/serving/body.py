"""The body of an images request: OpenAI's fields and ours, checked before anything is queued."""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import LanternError, RequestError, half_pair
from lantern_accel.families.base import Model
from lantern_accel.families.tokenizer import PromptText
from lantern_accel.generation.request import GenerationRequest, build_request
from lantern_accel.generation.settings import Settings, read_size
from lantern_accel.serving.refusals import Refusal, check_model, quote, wrong_value

#: Sizes that clients send where their user chose none: mapped to the model's own, and said so.
CLIENT_SIZES = ("512x512", "1024x1024")
#: Formats of images by OpenAI's names, and Pillow's.
FORMATS = {"png": "PNG", "webp": "WEBP", "jpeg": "JPEG"}

#: A seed, or -1 for a random one, as other programs write it.
Number = Annotated[float | None, Field(strict=True)]
Seed = Annotated[StrictInt, Field(ge=-1, lt=SEEDS)]


class Body(BaseModel):
    """The fields of ``POST /v1/images/generations``; others are ignored and named in the answer."""

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: StrictStr | StrictInt = Field(description="text, or a class id for a model of classes")
    model: StrictStr | None = Field(None, description="the name in /v1/models")
    n: int = Field(1, ge=1, le=10, strict=True, description="1 to 10 images")
    size: StrictStr | None = Field(None, description='"auto" or WIDTHxHEIGHT')
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] = Field(
        "auto", description="one of OpenAI's values; it changes nothing"
    )
    background: Literal["opaque", "auto"] | None = Field(
        None, description='"opaque" or "auto": images have no transparency'
    )
    moderation: Literal["low", "auto"] | None = Field(None, description="low or auto; no effect")
    output_format: Literal["png", "webp", "jpeg"] = Field(
        "png", description='"png", "webp" or "jpeg"'
    )
    output_compression: int = Field(100, ge=0, le=100, strict=True, description="0 to 100")
    response_format: Literal["b64_json"] | None = Field(
        None, description='"b64_json": this server keeps no files to give URLs of'
    )
    stream: StrictBool = Field(False, description="true or false: a stream of events")
    partial_images: int = Field(0, ge=0, le=3, strict=True, description="0 to 3, with stream")
    # Beyond OpenAI's.
    seed: Seed | list[Seed] | None = Field(
        None,
        description=f"an integer from 0 to {SEEDS - 1}, -1 for a random one, or a list with one for "
        "each image",
    )
    strategy: StrictStr | None = Field(None, description="a name in /v1/models")
    relaxed: StrictBool | None = Field(None, description="true or false: auto may be relaxed")
    tv_budget: Number = Field(None, description="a number: the largest TV per token")
    temperature: Number = Field(None, description="a number; 0 is greedy")
    top_k: StrictInt | None = Field(None, description="the number of codes to keep; 0 keeps all")
    top_p: Number = Field(None, description="the share of probability to keep")
    guidance_scale: Number = Field(None, description="a number; 1 or less is off")
    negative_prompt: StrictStr | None = Field(None, description="text")


#: Names of :func:`~lantern_accel.generate` and of other programs, by ours.
TAKEN = {"cfg_scale": "guidance_scale", "num_images": "n", "num_images_per_prompt": "n"}
#: A name this near to one of ours, and of its length give or take a letter, is a slip.
NEAR = 0.75
#: Fields that a model reads as text.
TEXTS = ("prompt", "negative_prompt")


@dataclass(frozen=True)
class ImageRequest:
    """One request, complete: how to answer, and what to generate.

    ``notes``: what was changed; ``ignored``: fields that mean nothing here; ``named`` returns what the
    client calls a field of :func:`~lantern_accel.generate`.
    """

    body: Body
    generation: GenerationRequest
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    named: Callable[[str], str] = str

    @property
    def seeds(self) -> list[tuple[int, int]]:
        """Of each image its seed, and its index below that seed."""
        every = range(self.generation.count)
        return list(zip(*self.generation.randomness(every), strict=True))


def read_body(given: object, model: Model[Any], most_prompt: int) -> ImageRequest:
    """Check a request's JSON; raises :class:`Refusal` with the field that is wrong.

    ``most_prompt``: characters.
    """
    if not isinstance(given, dict):
        raise wrong_value(
            None, 'the body is not a JSON object; send one such as {"prompt": "red heart"}'
        )
    named, sent, ignored = read_names(given)
    try:
        # null is the default, except for the prompt, which has none
        body = Body.model_validate(
            {name: one for name, one in named.items() if one is not None or name == "prompt"}
        )
    except ValidationError as error:
        raise _refuse_body(error, named, sent) from None
    if body.model is not None:
        check_model(body.model, model.manifest.name)
    values = dict(body)
    texts = {name: text for name in TEXTS if isinstance(text := values[name], str)}
    for name, text in texts.items():
        if len(text) > most_prompt:
            raise wrong_value(
                name, f"the {name} has {len(text)} characters; at most {most_prompt} are read"
            )
    size, notes = _size(body.size, model, sent.get("size", "size"))
    fields = {ours: TAKEN.get(ours, ours) for ours in Settings.model_fields}
    settings = {
        ours: values[theirs] for ours, theirs in fields.items() if theirs in Body.model_fields
    }
    settings |= {"size": size, "seed": _seeds(body.seed)}
    field: str | None = None

    def as_sent(ours: str) -> str:
        theirs = TAKEN.get(ours, ours)
        return sent.get(theirs, theirs)

    try:
        request = build_request(model.manifest, body.prompt, settings, named=as_sent)
        if isinstance(model.text, PromptText):
            for name, text in texts.items():
                field = name
                model.text.controls.check([text])
    except LanternError as error:
        raise wrong_value(as_sent(error.field or field or "") or None, str(error)) from None
    return ImageRequest(body, request, ignored, notes, as_sent)


def read_names(
    given: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, str], tuple[str, ...]]:
    """Return a body under our names, what was sent under another one, and what means nothing here.

    The second has the name that was sent, by ours. Raises :class:`Refusal` for a slip, and where one
    value comes under two names and differs.
    """
    found, sent = dict(given), dict[str, str]()
    for theirs, ours in TAKEN.items():
        _take(found, sent, theirs, ours, found.pop(theirs, None))
    sides = {name: found.pop(name, None) for name in ("width", "height")}
    if any(side is not None for side in sides.values()):
        for name, side in sides.items():
            if type(side) is not int:
                what = f"not {quote(side)}" if name in given else f"and {name} is missing"
                raise wrong_value(name, f"width and height are integers, in pixels, {what}")
        _take(found, sent, "width", "size", f"{sides['width']}x{sides['height']}")
    ignored = [name for name in found if name not in Body.model_fields]
    for name in ignored:
        near = difflib.get_close_matches(
            name[:80].lower(), [*Body.model_fields, *TAKEN], n=1, cutoff=NEAR
        )
        if near and abs(len(name) - len(near[0])) <= 1:
            text = f"there is no field {quote(name)} here; did you mean {near[0]}?"
            raise wrong_value(name[:80], text, "unknown_parameter")
    return found, sent, tuple(name[:80] for name in ignored[:32])


def _take(
    found: dict[str, object], sent: dict[str, str], theirs: str, ours: str, value: object
) -> None:
    if value is None:
        return
    if found.get(ours) not in (None, value):
        raise wrong_value(
            theirs,
            f"{theirs} means {ours} here, and {sent.get(ours, ours)} is sent too with another value, "
            f"{quote(found[ours])} and {quote(value)}; leave one out",
        )
    found[ours], sent[ours] = value, theirs


def check_text(found: object) -> None:
    """Raise :class:`Refusal` where a body has half a surrogate pair, in a value or in a name.

    JSON can write one, and no text can: nothing could be answered that repeats it.
    """
    if half_pair(json.dumps(found, ensure_ascii=False)):
        text = "the body has half a surrogate pair, which is not text; send names and text as UTF-8"
        raise wrong_value(None, text)


def _refuse_body(
    error: ValidationError, given: Mapping[str, object], sent: Mapping[str, str]
) -> Refusal:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "body"
    takes = Body.model_fields[name].description if name in Body.model_fields else "other names"
    theirs = sent.get(name, name)
    if first["type"] == "missing":
        text = f"the field {name} is missing; it takes {takes}"
        return wrong_value(name, text, "missing_required_parameter")
    return wrong_value(theirs, f"{theirs} cannot be {quote(given.get(name))}; it takes {takes}")


def _size(
    text: str | None, model: Model[Any], name: str
) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    if text is None or text == "auto":
        return None, ()
    try:
        asked = read_size(text)
        model.family.image_size(model.manifest, asked)
        return asked, ()
    except RequestError as error:
        if text not in CLIENT_SIZES:
            raise wrong_value(name, f"{error} (or send 'auto')") from None
    width, height = model.family.image_size(model.manifest, None)
    note = (
        f"size {text}, which clients send unasked, was taken for the model's own {width}x{height}"
    )
    return None, (note,)


def _seeds(given: int | list[int] | None) -> int | list[int] | None:
    """Return seeds with a random one where -1 was sent; None: one for all is to be found."""
    if isinstance(given, list):
        return [secrets.randbits(31) if seed == -1 else seed for seed in given]
    return None if given == -1 else given
