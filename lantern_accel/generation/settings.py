"""Settings of one call of ``generate``, besides its prompts.

Python's keywords, the command's options and what a notebook completes are made from these fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic import Field, ValidationError, field_validator

from lantern_accel.bounds import (
    MOST_BATCH,
    MOST_CLASS_ID,
    MOST_IMAGES,
    MOST_PIXELS,
    MOST_PROMPT,
    SEEDS,
)
from lantern_accel.errors import RequestError, did_you_mean, half_pair, plain, show, what_is_wrong
from lantern_accel.records import Frozen
from lantern_accel.strategy.rules import OPTION_NAMES, AcceptanceRule
from lantern_accel.strategy.sampling import named_once
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.values import Coupling, NeighbourSpace, Residual, Sampling, Strategy


def _option(text: str, *names: str, shown: type | None = None, **bounds: Any) -> Any:
    """Return a field: its help, the option's other names, and its type on the command line."""
    extra = {"names": list(names), "shown": shown.__name__ if shown else ""}
    return Field(None, description=text, json_schema_extra=extra, **bounds)  # type: ignore[arg-type]  # as pydantic has them


def _python(text: str, **bounds: Any) -> Any:
    """Return a field that is not an option of the command."""
    return Field(None, description=text, **bounds)


Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Side = Annotated[int, Field(ge=1, le=MOST_PIXELS)]


class Settings(Frozen):
    """Settings of a request. None takes the default of the preset or the model."""

    preset: str | None = _python(
        "Published settings by name; `lantern-accel models --presets` lists them."
    )
    strategy: str | Strategy | None = _option(
        "auto (the default: the fastest allowed strategy), vanilla, eagle, eagle2, lantern or lantern++; "
        "without a drafter self, scd or sjd; or a preset. Settings follow a colon: "
        "lantern++:k=10,lambda=2, auto:tv_budget=0.02, scd:coupling=maximal,drafts=window:32.",
        "-s",
    )
    relaxed: bool | None = _option(
        "Let auto relax acceptance (default: no). --no-relaxed also rejects relaxed strategies.",
        "--relaxed/--no-relaxed",
    )
    num_images: int | None = _option("Images per prompt. Default: 1.", "-n", ge=1, le=MOST_IMAGES)
    seed: Seed | tuple[Seed, ...] | None = _option(
        "Random seed. Exact strategies give the same images for it. Default: a random one, which is "
        "printed. In Python a list has one seed per image."
    )
    negative_prompt: str | None = _option(
        "Text that guidance avoids. Default: the empty prompt.", max_length=MOST_PROMPT
    )
    batch_size: int | None = _option(
        "Batch size. Default: as the device allows.", "--batch", "-b", ge=1, le=MOST_BATCH
    )
    size: tuple[Side, Side] | None = _option(
        "Width and height in pixels (768x512), for models with several sizes.", shown=str
    )
    drafts: str | AnyKind | None = _python(
        "none, chain:4, dynamic:TOP_K,DEPTH,TOTAL, a tree's name, paths 0,1,00,01, or window:16."
    )
    window: int | None = _python(
        "Tokens in the window of a strategy that drafts in one. Default: 16 or fewer, depending on "
        "device and batch."
    )
    accept: object = _python(
        "The acceptance rule with its values, such as lantern++:k=10,lambda=2."
    )
    k: int | None = _python("Neighbours whose probability is added to a drafted token's.")
    delta: float | None = _python("LANTERN's bound on the added probability, in (0, 1].")
    lam: float | None = _python("LANTERN++'s bound (lambda), 1 or more.")
    residual: Residual | None = _python("aggregate, official or optimal.")
    coupling: Coupling | None = _python(
        "invariant (default of exact strategies: a seed gives the same image with any drafts), or "
        "maximal (speculative sampling as published)."
    )
    neighbour_space: NeighbourSpace | None = _python(
        "Space of the distances between codes: decoder or raw."
    )
    tv_budget: float | None = _python(
        "Largest TV per token of relaxed acceptance, in (0, 1).", gt=0, lt=1
    )
    sampling: Sampling | None = Field(None, description="All sampling settings as one value.")
    temperature: float | None = _option("0: greedy. Default: the model's.", "-t")
    top_k: int | None = _option("Keep the k most likely tokens. 0 keeps all.")
    top_p: float | None = _option("Keep the most likely tokens up to this total probability.")
    cfg_scale: float | None = _option(
        "Guidance scale. 1 or less turns guidance off.", "--cfg-scale", "--guidance-scale"
    )
    cfg_interval: int | None = _python("Last guided token, counted after the first. -1: all.")
    cfg_scale_image: float | None = _python(
        "Weight of the prompt's images in Anole's three-way guidance."
    )

    @field_validator("seed", "num_images", "batch_size", mode="before")
    @classmethod
    def _is_a_number(cls, value: object) -> object:
        for one in value if isinstance(value, list | tuple) else (value,):
            a_bool = isinstance(one, bool) or "bool" in str(getattr(one, "dtype", ""))
            if a_bool or (isinstance(one, str) and "_" in one):  # which int() passes over
                raise ValueError(f"{show(one)} is not a number; give an integer")
        return value

    @field_validator("seed", mode="before")
    @classmethod
    def _is_in_order(cls, value: object) -> object:
        if isinstance(value, set | frozenset):
            raise ValueError("a set has no order; give a list with a seed for each image")
        return value

    @field_validator("size", mode="before")
    @classmethod
    def _read_size(cls, value: object) -> object:
        return read_size(value) if isinstance(value, str) else value

    @property
    def drafting(self) -> str | Strategy | None:
        """The strategy where it alone says where drafts come from."""
        others = (self.drafts, self.window, self.preset)
        return self.strategy if others == (None, None, None) else None

    def sampling_changes(self) -> dict[str, object]:
        """Return the sampling settings that were given one by one."""
        return {n: one for n, one in self if n in Sampling.model_fields and one is not None}


class Asked(TypedDict, total=False):
    """The fields of :class:`Settings` as keywords, for completion and type checks."""

    preset: str | None
    strategy: str | Strategy | None
    relaxed: bool | None
    num_images: int | None
    seed: int | Sequence[int] | None
    negative_prompt: str | None
    batch_size: int | None
    size: tuple[int, int] | str | None
    drafts: str | AnyKind | None
    window: int | None
    accept: str | AcceptanceRule | None
    k: int | None
    delta: float | None
    lam: float | None
    residual: Residual | None
    coupling: Coupling | None
    neighbour_space: NeighbourSpace | None
    tv_budget: float | None
    sampling: Sampling | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    cfg_scale: float | None
    cfg_interval: int | None
    cfg_scale_image: float | None
    guidance_scale: float | None


#: Numbers of a request below this are written with all of their digits in what is said of them.
WRITTEN_OUT = 1e18
#: How pydantic's names of errors begin for fields that take several kinds of values.
_OBJECTS = ("string", "is_", "model", "dict", "tuple", "too_", "literal")


def option_name(name: str) -> str:
    """Return what the command line calls a field of :class:`Settings`: ``--batch`` for ``batch_size``.

    A field without an option of its own is a setting of ``--strategy``.
    """
    extra = Settings.model_fields[name].json_schema_extra
    if not isinstance(extra, dict):
        return f"--strategy NAME:{OPTION_NAMES.get(name, name)}"
    names = extra.get("names")
    listed = names if isinstance(names, list) else []
    own = f"--{name.replace('_', '-')}"
    return next((str(one).partition("/")[0] for one in listed if str(one).startswith("--")), own)


def read_settings(given: Mapping[str, object], named: Callable[[str], str] = str) -> Settings:
    """Check keywords; raises :class:`RequestError` in one sentence, with the nearest name.

    ``named``: what the user calls a field, where that is not its name.
    """
    fields, given = Settings.model_fields, named_once(given)
    for name in given:
        if name not in fields:
            raise RequestError(f"generate takes no {show(name)}{did_you_mean(name, fields)}")
    try:
        settings = Settings.model_validate(dict(given))
        Sampling.model_validate(settings.sampling_changes())
        return settings
    except ValidationError as error:
        found = error.errors()
        name = str(found[0]["loc"][0]) if found[0]["loc"] else "settings"
        value = given.get(name)
        several = isinstance(value, list | tuple)
        first = found[-1 if several else 0]  # of what a field may be, a list comes last
        short = isinstance(value, float) and abs(value) < WRITTEN_OUT  # no infinity, and a number
        number = plain(float(value)) if short and value is not None else show(value)
        if first["type"].startswith(_OBJECTS):
            text = f" cannot be {show(value)}; it takes: {fields[name].description}"
        else:
            text = what_is_wrong(first, number)
        raise RequestError(f"{named(name)}{text}", field=name) from None


def read_size(text: str) -> tuple[int, int]:
    """Read ``WxH``; raises :class:`RequestError`."""
    found = re.fullmatch("([0-9]{1,18})x([0-9]{1,18})", text.lower())
    width, height = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (1 <= width <= MOST_PIXELS and 1 <= height <= MOST_PIXELS):
        raise RequestError(
            f"the size {text[:40]!r} is not possible; write WIDTHxHEIGHT, such as 768x512, with 1 to "
            f"{MOST_PIXELS} pixels a side"
        )
    return width, height


def check_prompts(prompt: object) -> tuple[str | int, ...]:
    """Return one prompt or several as a tuple; raises :class:`RequestError` for anything else."""
    if isinstance(prompt, str | int | bytes) and not isinstance(prompt, bool):
        prompt = (prompt,)
    try:
        prompts: tuple[str | int, ...] = tuple(prompt)  # type: ignore[arg-type]  # checked below
        wrong = next(filter(None, map(_wrong_prompt, prompts)), "")
        wrong = wrong if prompts else "there is no prompt; give at least one"
    except TypeError:
        wrong = f"{show(prompt)} is not a prompt; give text, a class id, or a list of them"
    if wrong:
        raise RequestError(wrong, field="prompt")
    return prompts


def _wrong_prompt(each: object) -> str:
    """Return what is wrong with a prompt; "" where nothing is."""
    if not isinstance(each, str | int) or isinstance(each, bool):
        return f"{show(each)} is not a prompt; give text or a class id"
    if isinstance(each, int):
        return f"{show(each)} is not a class id" if abs(each) > MOST_CLASS_ID else ""
    if half_pair(each):
        return f"the prompt {show(each)} holds half a surrogate pair; send text as UTF-8"
    if not each.strip():
        return "the prompt is empty; describe a thing, such as 'red heart'"
    if len(each) <= MOST_PROMPT:
        return ""
    return (
        f"the prompt has {len(each):,} characters, and a prompt has at most {MOST_PROMPT:,}; shorten it, "
        "or generate a file of prompts with --prompts"
    )


Called = TypeVar("Called", bound=Callable[..., object])


def takes_settings(function: Called) -> Called:
    """Show the fields of :class:`Settings` in the signature of a function that ends in ``**settings``."""
    own = inspect.signature(function)
    shown = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=field.annotation
        )
        for name, field in Settings.model_fields.items()
    ]
    *kept, _ = own.parameters.values()
    function.__signature__ = own.replace(parameters=[*kept, *shown])  # type: ignore[attr-defined]  # for help()
    return function
