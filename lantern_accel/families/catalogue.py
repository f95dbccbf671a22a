"""Finds published models by name, among those that the installed families list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lantern_accel.errors import ModelError, did_you_mean
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.published import Kind, ModelEntry
from lantern_accel.families.registry import families


def published(kind: Kind | None = "model") -> list[ModelEntry]:
    """Return the entries of one kind of all families, or all."""
    return [one for family in families() for one in family.published() if kind in (None, one.kind)]


def _by_name() -> dict[str, ModelEntry]:
    return {one.name: one for one in published(None)}


def entry(name: str) -> ModelEntry:
    """Return a published model or part; raises :class:`ModelError` with the nearest names."""
    known = _by_name()
    if name not in known:
        raise ModelError(f"no published model is named {name!r}{did_you_mean(name, known)}")
    return known[name]


def is_published(name: str) -> bool:
    """Return whether ``name`` is a published model (not a part of one)."""
    return any(one.name == name for one in published())


def parts_of(model: ModelEntry) -> dict[str, ModelEntry]:
    """Return the entries that a model's parts come from, by kind."""
    known = _by_name()
    return {known[name].kind: known[name] for name in model.uses}


def released(
    manifest: Manifest,
    manifest_of: Callable[[ModelEntry], Manifest],
    names: Sequence[str],
    **config: Any,
) -> ModelEntry | None:
    """Return the published model of a manifest's family whose target has the same sizes ``names``.

    ``manifest_of`` gives the manifest of an entry; ``config``: what the entry's own must say.
    """
    for one in published():
        if one.family != manifest.family or not config.items() <= one.config.items():
            continue
        theirs = manifest_of(one).target
        if all(getattr(theirs, name) == getattr(manifest.target, name) for name in names):
            return one
    return None
