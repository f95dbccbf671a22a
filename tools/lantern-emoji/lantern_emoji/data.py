"""The training images: emoji sets fetched, rendered to 64x64 RGB on white, and described.

``prepare_data`` makes the folder ``data/emoji-64`` in the cache; ``load_data`` reads it back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError

from lantern_accel.errors import DataError
from lantern_accel.files import cache_dir, read_json_file, write_json, write_whole
from lantern_accel.progress import Progress
from lantern_emoji import catalogue, sources
from lantern_emoji.captions import STYLES
from lantern_emoji.render import (
    SIZE,
    compose,
    decode,
    iconify,
    raster_set,
    render_svg,
    svg_folder,
)

_FORMAT = 2
_RASTER_PACKAGES = (sources.NOTO, sources.TWEMOJI, sources.FLUENT_3D)
# What decoders of damaged images raise.
_BAD_IMAGE = (OSError, ValueError, SyntaxError, EOFError, struct.error, RuntimeError, KeyError)


class Record(BaseModel):
    """One training image; ``index`` is its row in ``EmojiDataset.images``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    style: str
    concept: str
    tags: tuple[str, ...]
    group: str
    subgroup: str
    hexcode: str
    weight: float
    flippable: bool
    split: str


@dataclass(frozen=True)
class EmojiDataset:
    """Images uint8 ``[n, 64, 64, 3]`` on white and their records, in the same order.

    ``coverage`` uint8 ``[n, 64, 64]`` tells how much of each pixel is the picture's own.
    """

    images: NDArray[np.uint8]
    records: list[Record]
    manifest: dict[str, Any] = field(default_factory=dict)
    coverage: NDArray[np.uint8] | None = None

    def split(self, name: str) -> list[int]:
        """Return the indices of the images in split ``"train"`` or ``"heldout"``."""
        return [record.index for record in self.records if record.split == name]

    def sampling_weights(self) -> NDArray[np.float64]:
        """Return how often to draw each image, summing to 1; held-out images are 0."""
        weights = np.array([r.weight if r.split == "train" else 0.0 for r in self.records])
        return np.asarray(weights / weights.sum(), dtype=np.float64)


def _pictures(
    style: str, tarball: Path, concepts: list[catalogue.Concept]
) -> Iterator[tuple[str, Callable[[], Image.Image]]]:
    """Yield each concept's hexcode with a function that decodes or draws its picture."""
    package, inside = sources.IMAGE_SETS[style]
    if package in _RASTER_PACKAGES:
        for hexcode, blob in raster_set(tarball, inside, {c.hexcode for c in concepts}):
            yield hexcode, partial(decode, blob)
        return
    read = svg_folder if inside.endswith("/") else iconify
    drawings = read(tarball, inside)
    matched = catalogue.match_names(concepts, drawings)
    for concept in concepts:
        if concept.hexcode in matched:
            yield concept.hexcode, partial(render_svg, drawings[matched[concept.hexcode]])


def _attempt(
    job: tuple[str, Callable[[], Image.Image]],
) -> tuple[str, NDArray[np.uint8] | None, str]:
    hexcode, make = job
    try:
        return hexcode, compose(make()), ""
    except _BAD_IMAGE as error:  # left out, and named in the manifest
        return hexcode, None, f"{type(error).__name__}: {error}"[:120]


def render_set(
    jobs: Iterable[tuple[str, Callable[[], Image.Image]]], progress: Progress
) -> tuple[list[str], NDArray[np.uint8], dict[str, str]]:
    """Return the hexcodes drawn, their images ``[n, 64, 64, 4]``, and what was skipped and why."""
    codes: list[str] = []
    images: list[NDArray[np.uint8]] = []
    skipped: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        for hexcode, image, why in pool.map(_attempt, jobs):
            if image is None:
                skipped[hexcode] = why
            else:
                codes.append(hexcode)
                images.append(image)
            progress.advance(1)
    stacked = np.stack(images) if images else np.zeros((0, SIZE, SIZE, 4), np.uint8)
    return codes, stacked, skipped


def _set_of(
    style: str, folder: Path, tarball: Path, concepts: list[catalogue.Concept], progress: Progress
) -> tuple[list[str], NDArray[np.uint8], dict[str, str]]:
    """Render one image set, or read it back from ``folder`` where an earlier run did."""
    package, _ = sources.IMAGE_SETS[style]
    key = json.dumps([_FORMAT, package.integrity, sorted(c.hexcode for c in concepts)])
    part = folder / "parts" / f"{style.replace(' ', '-')}.npz"
    if part.is_file():
        with np.load(part) as stored:
            if str(stored["key"]) == key:
                return list(stored["codes"]), stored["images"], json.loads(str(stored["skipped"]))
    progress.start(f"rendering {style}")
    codes, images, skipped = render_set(_pictures(style, tarball, concepts), progress)
    progress.finish()
    if not codes:
        why = next(iter(skipped.values()), "it holds no picture of a known name")
        raise DataError(
            f"no picture of the set {style!r} ({package.name}@{package.version}) could be read "
            f"({why}); delete {tarball} and try again"
        )
    write_whole(
        part,
        lambda stream: np.savez(
            stream,
            key=np.array(key),
            codes=np.array(codes),
            images=images,
            skipped=np.array(json.dumps(skipped)),
        ),
    )
    return codes, images, skipped


def prepare_data(cache: Path | None = None, *, progress: Progress | None = None) -> EmojiDataset:
    """Fetch, render and store the training images; whatever is already there is kept.

    ``cache`` defaults to ``$LANTERN_ACCEL_CACHE`` or ``~/.cache/lantern_accel``. The result does
    not depend on the day or the machine. Raises ``DataError`` where a package cannot be fetched.
    """
    progress = Progress() if progress is None else progress
    root = cache or cache_dir()
    folder = root / "data" / f"emoji-{SIZE}"
    tarballs = {}
    progress.start("fetching image sets", len(sources.PACKAGES))
    for package in sources.PACKAGES:
        tarballs[package.name] = sources.fetch(package, root / "downloads")
        progress.advance(1)
    progress.finish()
    concepts = catalogue.read_catalogue(tarballs[sources.NAMES.name])
    by_hexcode = {concept.hexcode: concept for concept in concepts}
    records: list[Record] = []
    images: list[NDArray[np.uint8]] = []
    skipped: dict[str, dict[str, str]] = {}
    for style in STYLES:
        tarball = tarballs[sources.IMAGE_SETS[style][0].name]
        codes, pictures, bad = _set_of(style, folder, tarball, concepts, progress)
        if bad:
            skipped[style] = bad
        images.append(pictures)
        for code in codes:
            c = by_hexcode[code]
            records.append(
                Record(
                    index=len(records), style=style, concept=c.name, tags=c.tags, group=c.group,
                    subgroup=c.subgroup, hexcode=code, weight=c.weight, flippable=c.flippable,
                    split=c.split,
                )
            )  # fmt: skip
    manifest = _manifest(records, skipped)
    drawn = np.concatenate(images)
    stacked = np.ascontiguousarray(drawn[..., :3])
    coverage = np.ascontiguousarray(drawn[..., 3])
    lines = "".join(record.model_dump_json() + "\n" for record in records)
    write_whole(folder / "images.npy", lambda stream: np.save(stream, stacked))
    write_whole(folder / "coverage.npy", lambda stream: np.save(stream, coverage))
    write_whole(folder / "records.jsonl", lines)
    write_json(folder / "manifest.json", manifest)
    return EmojiDataset(stacked, records, manifest, coverage)


def _manifest(records: list[Record], skipped: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "size": SIZE,
        "images": len(records),
        "concepts": len({r.concept for r in records}),
        "heldout_concepts": sorted({r.concept for r in records if r.split == "heldout"}),
        "styles": {style: sum(r.style == style for r in records) for style in STYLES},
        "groups": {
            g: sum(r.group == g for r in records) for g in sorted({r.group for r in records})
        },
        "skipped": skipped,
        "packages": [
            {
                "name": p.name,
                "version": p.version,
                "integrity": p.integrity,
                "licence": p.licence,
                "attribution": p.attribution,
            }
            for p in sources.PACKAGES
        ],
    }


def load_data(cache: Path | None = None) -> EmojiDataset:
    """Return the images that ``prepare_data`` stored; ``DataError`` if they are not there."""
    folder = (cache or cache_dir()) / "data" / f"emoji-{SIZE}"
    command = "`python tools/lantern-emoji data`"
    try:
        manifest = read_json_file(folder / "manifest.json")
        images = np.load(folder / "images.npy")
        covered = folder / "coverage.npy"
        coverage = np.load(covered) if covered.is_file() else None
        with (folder / "records.jsonl").open(encoding="utf-8") as stream:
            records = [Record.model_validate_json(line) for line in stream]
    except FileNotFoundError as error:
        raise DataError(f"no training images in {folder}; run {command} first") from error
    except (ValueError, ValidationError) as error:
        raise DataError(f"{folder} is damaged ({error}); delete it and run {command}") from error
    if not isinstance(manifest, dict) or manifest.get("images") != len(records):
        raise DataError(f"{folder} is incomplete; delete it and run {command}")
    if images.shape != (len(records), SIZE, SIZE, 3):
        raise DataError(f"{folder} is incomplete; delete it and run {command}")
    if coverage is not None and len(coverage) != len(records):
        raise DataError(f"{covered} belongs to other images; delete {folder} and run {command}")
    return EmojiDataset(images, records, manifest, coverage)
