"""What was chosen for ``auto``, and from which measurements: files in the cache, and shipped ones.

A choice serves only what it was measured on: a device, its software, a model, a dtype, a batch, and
settings that change what a step costs or what drafts are worth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_accel.device.datasheets import ProfileError, profiles_dir
from lantern_accel.files import cache_dir, is_regular, write_json
from lantern_accel.strategy.values import Pace, Strategy

SCHEMA: Literal[1] = 1


class Measured(BaseModel):
    """One strategy that was measured for a choice; ``speedup`` is relative to plain decoding."""

    model_config = ConfigDict(extra="forbid")

    strategy: Strategy
    tokens_per_step: float = Field(ge=1, allow_inf_nan=False)
    tokens_per_second: float = Field(gt=0, allow_inf_nan=False)
    speedup: float = Field(gt=0, allow_inf_nan=False)


class Choice(BaseModel):
    """What auto decodes with under one key; ``speedup`` is predicted, relative to plain decoding."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lantern_accel.choice"] = "lantern_accel.choice"
    schema_version: Literal[1] = SCHEMA
    key: dict[str, Any]
    strategy: Strategy
    speedup: float | None = Field(None, gt=0, allow_inf_nan=False)
    source: Literal["tune", "while drawing"]
    measured: list[Measured] = []
    digest: str = Field("", description="of everything else: a file that was changed is not used")

    def sealed(self) -> Choice:
        """Return the choice with the digest of its content."""
        return self.model_copy(update={"digest": self._digest()})

    @property
    def whole(self) -> bool:
        """Whether the digest is that of the content."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        values = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Worth(BaseModel):
    """Tokens per step of a model, at one temperature: the device has no part in it.

    ``tokens_per_step``: of windows, by length; ``chains``: of its drafter's chains, by drafts and one.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lantern_accel.worth"] = "lantern_accel.worth"
    schema_version: Literal[1] = SCHEMA
    model: str
    weights_hash: str
    temperature: float
    relaxed: bool
    prompts: str = Field(description="where the prompts come from")
    tokens_per_step: dict[int, float]
    chains: dict[int, float] = {}


def choices_dir() -> Path:
    """Return where this user's choices are kept."""
    return cache_dir() / "choices"


def choice_path(key: dict[str, Any]) -> Path:
    """Return where the choice of this key is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return choices_dir() / f"{digest}.json"


def read_choice(key: dict[str, Any]) -> Choice | None:
    """Return the choice of exactly this key; None where there is none, or the file is damaged."""
    path = choice_path(key)
    try:
        if not is_regular(path):
            return None
        found = Choice.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None
    return found if found.key == key and found.whole else None


def write_choice(choice: Choice) -> Path:
    """Write a choice whole; return its file."""
    path = choice_path(choice.key)
    write_json(path, choice.sealed().model_dump(mode="json"))
    return path


def _shipped() -> Iterator[Worth]:
    try:
        folder = profiles_dir() / "choices"
    except ProfileError:
        return
    for path in sorted(folder.glob("*.json")):
        try:
            yield Worth.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError, ValueError):
            continue


def known_worth(weights_hash: str, temperature: float, relaxed: bool) -> Worth | None:
    """Return the shipped tokens per step of the nearest temperature; None for other models."""
    found = [
        one for one in _shipped() if one.weights_hash == weights_hash and one.relaxed == relaxed
    ]
    greedy = [one for one in found if (one.temperature == 0) == (temperature == 0)]
    return min(greedy, key=lambda one: abs(one.temperature - temperature), default=None)


def with_worth(paces: tuple[Pace, ...], worth: dict[int, float]) -> tuple[Pace, ...]:
    """Return paces with the worth that is known; what was measured before stays."""
    return tuple(
        pace
        if pace.worth is not None or pace.length not in worth
        else pace.model_copy(update={"worth": worth[pace.length]})
        for pace in paces
    )
