"""The families that are installed, each a plug-in loaded when first asked for, and their models."""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lantern_accel.checkpoints.layouts import drafter_weights
from lantern_accel.checkpoints.weights import has_weights
from lantern_accel.device.entry_points import Offers, Unfit, check_spec, load_offers, why
from lantern_accel.errors import CheckpointError, ModelError, did_you_mean
from lantern_accel.families.base import Family, Found, Parts
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.published import Kind, ModelEntry
from lantern_accel.families.spec import FAMILY_API_VERSION, FamilySpec


@functools.cache
def family_specs() -> Offers[FamilySpec]:
    """Ask every plug-in for its families once, in the order in which they are asked for files.

    ``broken`` has the reason for each plug-in that could not be asked.
    """
    offers = load_offers("lantern_accel_families", "family", _check)
    first = sorted(offers.specs.values(), key=lambda one: (-one.priority, one.name))
    return Offers({one.name: one for one in first}, offers.broken)


def _check(spec: object) -> FamilySpec:
    check_spec(spec, FamilySpec, "family", FAMILY_API_VERSION)
    assert isinstance(spec, FamilySpec)
    if spec.family.count(":") != 1:
        raise Unfit(f"its family {spec.name!r} is at {spec.family!r}; write 'package.module:Class'")
    return spec


@functools.cache
def _load(spec: FamilySpec) -> Family | str:
    """Import a family; return why it cannot be where it cannot."""
    try:
        made = pkgutil.resolve_name(spec.family)()
        if not isinstance(made, Family):
            raise Unfit(f"{spec.family} is a {type(made).__name__}, not a Family")
        if made.name != spec.name:
            raise Unfit(f"{spec.family} has name {made.name!r}, its FamilySpec {spec.name!r}")
    except (Exception, SystemExit) as error:  # a stranger's module may do anything
        return why(error)
    return made


def forget() -> None:
    """Forget every family, so that the next question finds what is installed then."""
    family_specs.cache_clear()
    _load.cache_clear()


def family_names() -> list[str]:
    """Return the names of the installed families, the first to be asked for files first."""
    return list(family_specs().specs)


def families() -> Iterator[Family]:
    """Go through the families that load; :func:`broken_families` names the others."""
    for spec in family_specs().specs.values():
        found = _load(spec)
        if isinstance(found, Family):
            yield found


def broken_families() -> dict[str, str]:
    """Return why each family that is installed cannot be used, by its or its plug-in's name."""
    offers = family_specs()
    reasons = {name: _load(spec) for name, spec in offers.specs.items()}
    return {**offers.broken, **{k: v for k, v in reasons.items() if isinstance(v, str)}}


def family(name: str) -> Family:
    """Return a family by name; raises :class:`ModelError` where it is absent or broken."""
    offers = family_specs()
    known = name in offers.specs
    found = _load(offers.specs[name]) if known else offers.broken.get(name)
    if found is None:
        raise ModelError(
            f"no model family {name!r} is installed{did_you_mean(name, family_names())}"
        )
    if isinstance(found, str):
        raise ModelError(
            f"the model family {name!r} failed to load: {found}; reinstall its package"
        )
    return found


def list_published(kind: Kind | None = "model") -> list[ModelEntry]:
    """Return the entries of one kind of all families, or all."""
    return [
        one for family in families() for one in family.list_published() if kind in (None, one.kind)
    ]


def _by_name() -> dict[str, ModelEntry]:
    return {one.name: one for one in list_published(None)}


def entry(name: str) -> ModelEntry:
    """Return a published model or part; raises :class:`ModelError` with the nearest names."""
    known = _by_name()
    if name not in known:
        raise ModelError(f"no published model is named {name!r}{did_you_mean(name, known)}")
    return known[name]


#: How a repository of the Hub is written, with its address or without: its id, a revision, a place in it.
_HUB = re.compile(
    r"(?:https?://)?(?:www\.)?(?:(?:huggingface\.co|hf\.co)/|hf:/*)?([^/@?]+/[^/@?]+)"
    r"(?:@([^/?]*)|/(?:tree|blob|resolve|raw)/([^/?]*))?(.*)",
    re.IGNORECASE,
)


def known_as(text: str) -> str:
    """Return the name of the published model or part that a text means; the text where it means none.

    Case does not count. A repository's id of the Hub counts as the model that it holds, with its
    address, the revision ``main``, a file or a folder of it. Raises :class:`ModelError` for a repository
    that holds several, with their names, and for another revision.
    """
    known = _by_name()
    if text.lower() in known:
        return text.lower()
    match = _HUB.fullmatch(text.strip().lower())
    if match is None or not (held := [e for e in known.values() if e.repo.lower() == match[1]]):
        return text
    revision = match[2] or match[3] or "main"
    if revision != "main":
        raise ModelError(
            f"{text} names the revision {revision!r}, and published models are known as they are on "
            f"main; leave it out ({held[0].repo}), or download that revision and name its folder"
        )
    held = [e for e in held if any(f.path.lower() in match[4] for f in e.files)] or held
    models = [one for one in held if one.kind == "model"] or held
    if len(models) > 1:
        names = ", ".join(one.name for one in models)
        raise ModelError(f"{models[0].repo} holds several models; name one of them: {names}")
    return models[0].name


def is_published(name: str) -> bool:
    """Return whether ``name`` is a published model (not a part of one)."""
    return any(one.name == name for one in list_published())


def parts_of(model: ModelEntry) -> dict[str, ModelEntry]:
    """Return the entries that a model's parts come from, by kind."""
    known = _by_name()
    return {known[name].kind: known[name] for name in model.uses}


def entry_at(kind: str, path: Path) -> ModelEntry | None:
    """Return the published model of a family whose repository names a path or a folder above it.

    As released, or as the Hub's cache has it (``models--OWNER--NAME``); None where none is so called.
    """
    repos = {
        one.repo.lower().rpartition("/")[2]: one for one in list_published() if one.family == kind
    }
    names = (part.lower().rpartition("--")[2] for part in reversed(path.absolute().parts[-6:]))
    return next((repos[name] for name in names if name in repos), None)


def ask_for_name(path: Path, what: str, names: Sequence[str]) -> CheckpointError:
    """Return the error for files of one of several published models, which the user has to name."""
    return CheckpointError(
        f"nothing in {path} says {what}; name the model that it is: --model {names[0]}={path}"
        + (f" (or {', '.join(names[1:])})" if names[1:] else "")
    )


def entries_like(manifest: Manifest) -> list[ModelEntry]:
    """Return the published models of a manifest's family whose targets have its sizes."""
    kind = family(manifest.family)
    models = (one for one in kind.list_published() if one.kind == "model")
    return [one for one in models if _sizes(kind.from_entry(one)) == _sizes(manifest)]


def _sizes(manifest: Manifest) -> list[object]:
    """Return what a released target is known by: its trunk, its vocabularies and its image."""
    target, names = (
        manifest.target,
        {"token_count", "grid", "conditioning", "num_classes", "caption_dim"},
    )
    sizes = target.model_dump(include=names), manifest.model_dump(include={"side"})
    return [replace(target.decoder, eps=0.0), target.vocab_size, *sizes]


def ask(kind: Family, path: Path, parts: Parts) -> Found | None:
    """Ask a family what lies at a path; name a published model as it is, and add a drafter.

    The drafter is the one that was named, or of those near the model the first that fits. Raises
    :class:`CheckpointError` for files of the family that cannot be used, such as drafters of which none
    fits.
    """
    found = kind.detect(path, parts)
    if found is None:
        return None
    variant, here = found.manifest.variant, parts.entry or entry_at(kind.name, path)
    same = [e for e in entries_like(found.manifest) if e.config.get("variant") in (None, variant)]
    known = here if here in same else next(iter(same), None)
    if known is not None:
        found.manifest = found.manifest.model_copy(update=known.labels)
    if not parts.no_drafter and kind.drafter_type is not None:
        _add_drafter(kind, found, known)
    return found


def _add_drafter(kind: Family, found: Found, known: ModelEntry | None) -> None:
    given, near = found.parts.drafter, list(kind.drafters_near(found))
    there = map(drafter_weights, near if given is None else [given])
    wrong: CheckpointError | None = None
    for one in there:
        if given is None and not (one.is_file() or (one.is_dir() and has_weights(one))):
            continue
        try:
            found.manifest, found.files["drafter"] = kind.with_drafter(found.manifest, one)
            return
        except CheckpointError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    theirs = None if known is None else parts_of(known).get("drafter")
    found.missing["drafter"] = (
        f"a drafter: put {'one' if theirs is None else theirs.repo} into {near[0]}, name it with --use "
        "drafter=PATH, or train one with `lantern-accel train drafter`"
    )
