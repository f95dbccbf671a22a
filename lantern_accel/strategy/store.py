"""Tuned trees on disk: what they were made for, their evidence, and finding the one that fits.

A tree is used only for exactly what it was measured on. The user's own lie in the cache, those that
ship with the package in ``profiles/trees``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_accel.cached import read_record, write_record
from lantern_accel.device.backend import Backend
from lantern_accel.device.datasheets import ProfileError, profiles_dir
from lantern_accel.errors import LanternWarning
from lantern_accel.files import cache_dir, read_text_file
from lantern_accel.strategy.values import Path as TreePath
from lantern_accel.strategy.values import StaticTree, Strategy

SCHEMA = 2

#: Parts of a key that change with an upgrade or another model: a tree that differs only here is stale.
VERSIONS = ("model", "weights_hash", "backend", "torch")


class Candidate(BaseModel):
    """One tree: predicted and, for the best few, measured."""

    model_config = ConfigDict(extra="forbid")

    paths: tuple[TreePath, ...]
    depth: int
    expected_tokens: float = Field(description="tokens a step under the measured rates")
    predicted_ms: float
    measured_tokens_per_second: float | None = None
    measured_compression: float | None = None

    @property
    def predicted_rate(self) -> float:
        """Tokens a millisecond."""
        return self.expected_tokens / self.predicted_ms


class Tuned(BaseModel):
    """A tuned tree with its evidence; ``key`` says what it was made for."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    key: dict[str, Any]
    tree: StaticTree
    tokens_per_second: float
    vanilla_tokens_per_second: float
    rates: list[list[float]] = Field(description="acceptance by depth and sibling rank")
    costs: list[dict[str, float]] = Field(description="timed trees: nodes, depth, tests, ms a step")
    candidates: list[Candidate]
    environment: dict[str, Any]


def key_of(
    model: str,
    weights_hash: str,
    backend: Backend,
    dtype: torch.dtype,
    strategy: Strategy,
    temperature: float,
) -> dict[str, Any]:
    """Return everything that a tuned tree depends on."""
    facts = backend.facts()
    return {
        "model": model,
        "weights_hash": weights_hash,
        "backend": f"{backend.name} {backend.version}",
        "device_name": facts.name,
        "threads": facts.threads,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "captured": bool(backend.support("capture")),
        "greedy": temperature == 0,
        "acceptance": strategy.acceptance.model_dump(mode="json"),
        "residual": strategy.residual,
    }


def trees_dir() -> Path:
    """Return where the user's own trees are kept."""
    return cache_dir() / "trees"


def tuned_path(key: dict[str, Any]) -> Path:
    """Return where a tuned tree of this key is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return trees_dir() / f"{digest}.json"


def _own() -> Iterator[Tuned]:
    """Go through the user's own trees; what is damaged or of another version is passed over."""
    try:
        paths = sorted(trees_dir().glob("*.json"))
    except OSError:
        return
    for path in paths:
        record = read_record(path)
        if record is not None:
            with contextlib.suppress(ValidationError):
                yield Tuned.model_validate(record)


def _shipped() -> Iterator[Tuned]:
    for path in sorted((profiles_dir() / "trees").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield Tuned.model_validate_json(read_text_file(path))


def keep_tuned(found: Tuned) -> None:
    """Keep a tree for :func:`read_tuned`; raises OSError where the cache cannot be written."""
    write_record(tuned_path(found.key), found.model_dump(mode="json"))


def read_tuned(key: dict[str, Any]) -> Tuned | None:
    """Return the tuned tree of exactly this key, the user's own before a shipped one; else None.

    Warns where the user tuned the same thing for another model or version.
    """
    own = list(_own())
    found = next((one for one in own if one.key == key), None)
    if found is not None:
        return found
    try:
        shipped = next((t for t in _shipped() if t.key == key), None)
    except ProfileError:  # an installation without profiles has no shipped trees either
        shipped = None
    if shipped is None:
        _warn_of_stale(key, own)
    return shipped


def _warn_of_stale(key: dict[str, Any], own: list[Tuned]) -> None:
    for one in own:
        differing = [name for name in key if one.key.get(name) != key[name]]
        if set(differing) <= set(VERSIONS) and one.key.get("model") == key["model"]:
            what = ", ".join(f"{n} {one.key.get(n)!r}, not {key[n]!r}" for n in differing)
            warnings.warn(
                f"the tuned tree for {key['model']!r} on this device was made for {what}; it is not "
                "used, run `lantern-accel tune` again",
                LanternWarning,
                stacklevel=4,
            )
            return
