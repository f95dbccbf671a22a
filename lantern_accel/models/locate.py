"""Finds the files of a ``--model``: a bundled name, a published name, or a path."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from lantern_accel.checkpoints.kinds import named_kinds
from lantern_accel.checkpoints.layouts import search
from lantern_accel.checkpoints.weights import SUFFIXES, quantized_error
from lantern_accel.device.entry_points import why
from lantern_accel.errors import LanternError, ModelError, RequestError, did_you_mean
from lantern_accel.families.base import Family, Found, Parts
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.registry import (
    ask,
    broken_families,
    entry,
    families,
    family,
    is_published,
    known_as,
    list_published,
)
from lantern_accel.files import read_json_file
from lantern_accel.models.bundle import bundled_models, folder_parts, read_manifest, with_head
from lantern_accel.models.hub import Reporter, resolve
from lantern_accel.records import Frozen, first_wrong

NO_DRAFTER = "none"
#: What ``train --into`` writes for official files.
TRAINED = "parts.json"


class TrainedParts(Frozen):
    """A model of official files, and paths of the parts that were trained for it."""

    model: str
    drafter: Path | None = None
    head: Path | None = None


def trained_parts(folder: str | Path) -> TrainedParts | None:
    """Return what ``train --into`` wrote into a folder; raises :class:`ModelError`. None: nothing."""
    path = Path(folder) / TRAINED
    if not path.is_file():
        return None
    again = "write it again with `lantern-accel train head --into`"
    try:
        found = TrainedParts.model_validate(read_json_file(path))
    except ValidationError as error:
        raise ModelError(f"{path}: {first_wrong(error)}; {again}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; {again}") from None
    parts = {"drafter": found.drafter, "head": found.head}
    return found.model_copy(
        update={part: (path.parent / one).resolve() for part, one in parts.items() if one}
    )


def named_parts(
    *,
    vq: str | Path | None = None,
    drafter: str | Path | None = None,
    head: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_device: Literal["device", "cpu"] = "device",
    embeddings: str | Path | None = None,
) -> Parts:
    """Return the parts that a user named; raises :class:`ModelError` for a path that is not there."""
    without = {"drafter": str(drafter) == NO_DRAFTER, "head": str(head) == NO_DRAFTER}
    given = {"vq": vq, "drafter": drafter, "head": head, "text-encoder": text_encoder}
    paths = {
        option: Path(value)
        for option, value in given.items()
        if value is not None and not without.get(option)
    }
    for option, path in paths.items():
        if not path.exists():
            raise ModelError(f"there is no {path} (given with --use {option}); check the path")
    if text_device not in ("device", "cpu"):
        raise RequestError(f"the text encoder runs on 'device' or on 'cpu', not on {text_device!r}")
    return Parts(
        vq=paths.get("vq"),
        drafter=paths.get("drafter"),
        no_drafter=without["drafter"],
        head=paths.get("head"),
        no_head=without["head"],
        text=paths.get("text-encoder"),
        embeddings=Path(embeddings) if embeddings is not None else None,
        text_device=text_device,
    )


def log(text: str) -> None:
    """Say something on standard error, as Python's logging is set up to."""
    logging.getLogger("lantern_accel").warning(text)


def find_model(name: str | Path, parts: Parts | None = None, tell: Reporter = log) -> Found:
    """Return the files of a model given by name or by path, fetching a published one if need be.

    ``parts``: those that are named elsewhere. ``NAME=PATH`` says which published model the files at a
    path are. ``tell`` gets a licence and what is fetched. Raises :class:`ModelError` for a name that is
    unknown, :class:`CheckpointError` for files that cannot be used.
    """
    parts = parts or Parts()
    if (trained := trained_parts(name)) is not None:
        name = trained.model
        drafter = None if parts.no_drafter else parts.drafter or trained.drafter
        head = None if parts.no_head else parts.head or trained.head
        parts = replace(parts, drafter=drafter, head=head)
    path = Path(name) if Path(name).exists() else Path(str(name).partition("=")[2] or name)
    named = (path, parts.vq, parts.drafter, parts.text)
    with named_kinds(place for place in named if place is not None):
        return with_head(_find(name, parts, tell), parts)


def _find(name: str | Path, parts: Parts, tell: Reporter) -> Found:
    known = bundled_models()
    if str(name) in known:
        return folder_parts(known[str(name)], parts)
    if is_published(str(name)):
        return find_published(str(name), parts, tell)
    if not str(name).strip():
        raise ModelError("the model's name is empty; `lantern-accel models` lists names")
    path = Path(name)
    said, _, rest = str(name).partition("=")
    if rest and not path.exists() and is_published(known_as(said)):
        one, path = entry(known_as(said)), Path(rest)
        if not path.exists():
            raise ModelError(f"there is no {path}; check the path")
        return find_official(path, replace(parts, entry=one), [family(one.family)])
    if (path / "model.json").is_file():
        return folder_parts(path, parts)
    if path.exists():
        return find_official(path, parts)
    alias = known_as(str(name))
    if is_published(alias):
        return find_published(alias, parts, tell)
    if alias != str(name):  # a part of models
        raise ModelError(
            f"{name} is {alias!r}, a part that models use and no model; `lantern-accel models fetch "
            f"{alias}` gets it"
        )
    if path.suffix in SUFFIXES or len(path.parts) > 1:
        raise ModelError(
            f"there is no {path}; check the path, or use a name that `lantern-accel models` lists"
        )
    names = [*known, *(one.name for one in list_published())]
    raise ModelError(
        f"unknown model {str(name)!r}{did_you_mean(str(name), names)} (a model is a name that "
        f"`lantern-accel models` lists, or a folder or file of its weights){_broken()}"
    )


def known_manifest(name: str | Path) -> Manifest | None:
    """Return the manifest of a bundled or published model, fetching nothing; None: of neither."""
    known = bundled_models()
    if str(name) in known:
        return read_manifest(known[str(name)])
    alias = str(name) if is_published(str(name)) or Path(name).exists() else known_as(str(name))
    if not is_published(alias):
        return None
    found: Manifest = family(entry(alias).family).from_entry(entry(alias))
    return found


def check_size(name: str | Path, size: tuple[int, int] | None) -> None:
    """Raise :class:`RequestError` for a size that a known model cannot generate, before it is fetched."""
    manifest = None if size is None else known_manifest(name)
    if manifest is not None:
        manifest.grid(size)


def find_published(name: str, parts: Parts, tell: Reporter) -> Found:
    """Fetch a published model and the parts that were not named elsewhere."""
    one = entry(name)
    kind = family(one.family)  # before anything is fetched
    named = {"vq": parts.vq, "drafter": parts.drafter or parts.no_drafter, "text": parts.text}
    skip = {part for part, value in named.items() if value}
    if parts.embeddings is not None:
        skip.add("text")
    files = resolve(one, tell, skip=skip)
    given = replace(
        parts,
        vq=parts.vq or files.get("vq"),
        drafter=None if parts.no_drafter else parts.drafter or files.get("drafter"),
        no_drafter=parts.no_drafter or (parts.drafter is None and "drafter" not in files),
        text=parts.text or files.get("text"),
        entry=one,
    )
    found = ask(kind, files["target"], given)
    if found is None:
        raise ModelError(
            f"the files of {name} at {files['target']} are not what was published; delete them and fetch "
            "them again"
        )
    return replace(found, manifest=found.manifest.model_copy(update={"name": name}))


def find_official(path: Path, parts: Parts, asked: Iterable[Family] | None = None) -> Found:
    """Ask families, all by default, whether the files at ``path`` are their own."""
    refused: list[LanternError] = []
    failed: dict[str, str] = {}
    for kind in families() if asked is None else asked:
        try:
            found = ask(kind, path, parts)
        except LanternError as error:  # its own files, which cannot be used; or another family's
            refused.append(error)
            continue
        except Exception as error:  # a stranger's family may do anything
            failed[kind.name] = why(error)
            continue
        if found is not None:
            return found
    if refused:
        raise refused[0]
    held = _list_weights(path)
    if not held and (gguf := next(path.glob("*.gguf"), None)):
        raise quantized_error(gguf, "GGUF")
    what = "folder" if path.is_dir() else "file"
    state = (
        f"holds {held}, which is not a model that this version knows"
        if held
        else "holds no weights"
    )
    raise ModelError(
        f"the {what} {path} {state}; name a folder with a model.json, or one laid out as the model's "
        f"README says{_broken(failed)}"
    )


def _broken(failed: Mapping[str, str] | None = None) -> str:
    """Say which families could not be asked, and why."""
    reasons = {**broken_families(), **(failed or {})}
    return "".join(
        f"; the family {name!r} could not be asked: {text}" for name, text in reasons.items()
    )


def _list_weights(path: Path) -> str:
    """Name the weights that lie at a path with their first keys; empty where there are none."""
    held = search([path], lambda checkpoint: ", ".join(list(checkpoint)[:2]))
    names = [
        f"{one.name} ({k}, ...)" if k and isinstance(k, str) else one.name
        for one, k in held.items()
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}" if names else ""
