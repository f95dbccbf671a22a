"""The store of what tuning found fastest: a choice under each key, in the cache or shipped.

Its key holds stable facts alone: device, software, model, dtype, and settings that change costs or
drafts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import Field, ValidationError

from lantern_accel._version import __version__
from lantern_accel.device.datasheets import ProfileError, profiles_dir
from lantern_accel.errors import LanternWarning
from lantern_accel.files import cache_dir, read_record, write_record
from lantern_accel.records import Record, digest
from lantern_accel.strategy.values import Strategy

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend

CommittedPath = TypeVar("CommittedPath", bound=Record)

SCHEMA: Literal[1] = 1
#: What is kept under a key: a strategy's static tree, what auto stands for, costs of rows.
Kind = Literal["tree", "auto", "rows"]
#: Parts of a key that change with an upgrade or another model: a choice that differs only here is stale.
VERSIONS = ("lantern_accel", "model", "weights_hash", "backend", "torch")


class MeasuredStrategy(Record):
    """One strategy that was measured for a choice; ``speedup`` is relative to plain decoding."""

    strategy: Strategy
    tokens_per_step: float = Field(ge=1, allow_inf_nan=False)
    tokens_per_second: float = Field(gt=0, allow_inf_nan=False)
    speedup: float = Field(gt=0, allow_inf_nan=False)


class Choice(Record):
    """What is decoded with under one key; ``speedup`` is relative to plain decoding.

    ``evidence``: what else it was chosen by, such as acceptance rates and the costs of steps.
    """

    kind: Literal["lantern_accel.choice"] = "lantern_accel.choice"
    schema_version: Literal[1] = SCHEMA
    key: dict[str, object]
    strategy: Strategy
    speedup: float | None = Field(None, gt=0, allow_inf_nan=False)
    source: Literal["tune", "while generating"]
    measured: list[MeasuredStrategy] = Field(default_factory=list)
    evidence: dict[str, Any] = Field(default_factory=dict)
    again: int = Field(0, ge=0, description="later requests that measure it again")


class Payoff(Record):
    """Tokens per step of a model's exact drafts, at one temperature: the device has no part in it.

    ``tokens_per_step``: of windows, by length; ``by_head``: of windows whose drafts its draft head
    guesses.
    """

    kind: Literal["lantern_accel.payoff"] = "lantern_accel.payoff"
    schema_version: Literal[1] = SCHEMA
    model: str
    weights_hash: str
    temperature: float
    prompts: str = Field(description="where the prompts come from")
    tokens_per_step: dict[int, float]
    by_head: dict[int, float] = Field(default_factory=dict)


def key_of(
    kind: Kind,
    model: Any,
    backend: Backend,
    dtype: torch.dtype,
    strategy: Strategy,
    /,
    **settings: object,
) -> dict[str, object]:
    """Return everything that a choice depends on; ``settings``: what is particular to its kind.

    ``model``: a loaded one. Options of a device are among its notes, its readings are not.
    """
    facts = backend.facts()
    return {
        "kind": kind,
        "lantern_accel": __version__,
        "model": model.manifest.name,
        "weights_hash": model.weights_hash,
        "backend": f"{backend.name} {backend.version}",
        "device_name": facts.name,
        "notes": sorted(facts.notes),
        "threads": facts.threads,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "captured": bool(backend.support("capture")),
        "acceptance": strategy.acceptance.model_dump(mode="json"),
        **settings,
    }


def choices_dir() -> Path:
    """Return where this user's choices are kept."""
    return cache_dir() / "choices"


def choice_path(key: dict[str, object]) -> Path:
    """Return where the choice of this key is kept."""
    return choices_dir() / f"{digest(key)[:16]}.json"


def read_choice(key: dict[str, object]) -> Choice | None:
    """Return the choice of exactly this key, the user's own before a shipped one; else None.

    A damaged or changed file is not a choice.
    """
    kept = _read(choice_path(key), Choice)
    found = [*([] if kept is None else [kept]), *_read_shipped(Choice)]
    return next((one for one in found if one.key == key), None)


def warn_of_stale(key: dict[str, object]) -> None:
    """Warn where the user tuned the same thing for another model or version."""
    with suppress(OSError):
        for path in sorted(choices_dir().glob("*.json")):
            one = _read(path, Choice)
            if one is None or one.key.get("model") != key["model"]:
                continue
            differing = [name for name in key if one.key.get(name) != key[name]]
            if differing and set(differing) <= set(VERSIONS):
                what = ", ".join(f"{n} {one.key.get(n)!r}, not {key[n]!r}" for n in differing)
                warnings.warn(
                    f"the tuned {key['kind']} for {key['model']!r} on this device was made for {what}; "
                    "it is not used, run `lantern-accel tune` again",
                    LanternWarning,
                    stacklevel=4,
                )
                return


def write_choice(choice: Choice) -> Path:
    """Keep a choice, where the cache can be written; return its file."""
    path = choice_path(choice.key)
    write_record(path, choice.model_dump(mode="json"))
    return path


def _read(path: Path, kind: type[CommittedPath]) -> CommittedPath | None:
    """Return the record of a file; None for a pipe, a damaged file and another kind of record."""
    with suppress(ValidationError):
        return kind.model_validate(read_record(path))
    return None


def _read_shipped(kind: type[CommittedPath]) -> Iterator[CommittedPath]:
    try:
        folder = profiles_dir() / "choices"
    except ProfileError:  # an installation without profiles ships no choices either
        return
    for path in sorted(folder.glob("*.json")):
        if (found := _read(path, kind)) is not None:
            yield found


def known_tokens_per_step(weights_hash: str, temperature: float) -> Payoff | None:
    """Return the shipped tokens per step of the nearest temperature; None for other models."""
    found = [one for one in _read_shipped(Payoff) if one.weights_hash == weights_hash]
    greedy = [one for one in found if (one.temperature == 0) == (temperature == 0)]
    return min(greedy, key=lambda one: abs(one.temperature - temperature), default=None)
