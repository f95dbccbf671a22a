"""Chooses what the images show: which of emojibase's concepts are kept, how often, or held out."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_accel.errors import DataError

HELD_OUT_SHARE = 0.04
"""Share of concepts that no training image shows; the same concepts in every image set."""

LISTS = json.loads((Path(__file__).parents[1] / "concepts.json").read_text(encoding="utf-8"))
ALWAYS_TRAINED = frozenset(LISTS["always_trained"])
"""Common concepts that are never held out."""
COMMON: tuple[str, ...] = tuple(LISTS["common"])
"""What people ask for first: training may draw these more often, and scenes are made of them."""

_LEFT_OUT_SUBGROUPS = {"keycap", "alphanum", "punctuation", "math", "currency", "skin-tone"}
_LEFT_OUT = re.compile(
    r"o\u2019clock$|-thirty$|^(atm sign|water closet|copyright|registered|trade mark)$"
    r"|^(back|end|on!|soon|top) arrow$|^eighteen|^no one under|^part alternation|curly loop$"
)
_FLAG_SUBGROUPS = {"country-flag", "subdivision-flag"}
_GENDERED = re.compile(r"^(man|woman|men|women|person|people|family|couple|kiss|deaf)\b")
_SIDED = re.compile(r"\b(left|right|leftwards|rightwards)\b|speech|calendar|\bd?ocument|\bsign\b")
_UNFLIPPABLE_SUBGROUPS = {
    "time", "award-medal", "sound", "music", "phone", "computer", "book-paper", "money", "office",
}  # fmt: skip


@dataclass(frozen=True)
class Concept:
    """One thing to draw; ``keys`` are the squashed names that image sets know it by."""

    hexcode: str
    name: str
    tags: tuple[str, ...]
    group: str
    subgroup: str
    weight: float
    flippable: bool
    split: str
    keys: tuple[str, ...]


def squash(name: str) -> str:
    """Return the lower-case ASCII letters and digits of ``name``, for matching file names."""
    decomposed = unicodedata.normalize("NFKD", name).lower()
    return "".join(c for c in decomposed if c.isascii() and c.isalnum())


def bare(hexcode: str) -> str:
    """Return a hexcode such as ``2764-FE0F`` in lower case without presentation selectors."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def split_of(name: str) -> str:
    """Return ``"heldout"`` for about 4% of concept names, by a stable hash, else ``"train"``."""
    if name in ALWAYS_TRAINED:
        return "train"
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64 else "train"


def weight_of(group: str, subgroup: str, name: str, hexcode: str) -> float:
    """Return how often a concept is drawn: pictures 1, variants of people 0.3, flags 0.15."""
    if subgroup in _FLAG_SUBGROUPS:
        return 0.15
    if group in ("flags", "symbols"):
        return 0.5
    if group == "people-body":
        joined = "200D" in hexcode.split("-")
        if joined or subgroup == "family" or (subgroup != "person" and _GENDERED.match(name)):
            return 0.3
    return 1.0


def flippable_of(group: str, subgroup: str, name: str) -> bool:
    """Return whether the mirror image still shows the same thing (no text, sides or flags)."""
    if group == "flags" or (group == "symbols" and subgroup != "geometric"):
        return False
    return subgroup not in _UNFLIPPABLE_SUBGROUPS and not _SIDED.search(name)


def concept_name(label: str) -> str:
    """Return an emojibase label as words of a caption, such as ``"flag of japan"``."""
    name = label.lower().strip()
    if name.startswith("flag: "):
        return "flag of " + name[6:]
    return name.replace(": ", " with " if name.endswith((" hair", "bald", "beard")) else " ")


def read_catalogue(tarball: Path) -> list[Concept]:
    """Return the concepts of an ``emojibase-data`` tarball that read as pictures, in its order."""
    with tarfile.open(tarball) as archive:
        entries = _json(archive, "package/en/data.json")
        meta = _json(archive, "package/meta/groups.json")
        codes = [
            _json(archive, f"package/en/shortcodes/{name}.json")
            for name in ("cldr", "emojibase", "iamcal", "joypixels", "github")
        ]
    return _concepts(entries, meta, codes)


def _json(archive: tarfile.TarFile, member: str) -> Any:
    try:
        stream = archive.extractfile(member)
    except KeyError:
        stream = None
    if stream is None:
        raise DataError(
            f"{member} is missing from {archive.name!s}; delete that file and try again"
        )
    return json.load(stream)


def _concepts(
    entries: Iterable[Mapping[str, Any]],
    meta: Mapping[str, Mapping[str, str]],
    codes: Iterable[Mapping[str, str | list[str]]],
) -> list[Concept]:
    codes = list(codes)
    concepts = []
    for entry in entries:
        if "group" not in entry:
            continue  # a regional indicator letter
        group = meta["groups"][str(entry["group"])]
        subgroup = meta["subgroups"][str(entry["subgroup"])]
        label, hexcode = str(entry["label"]), str(entry["hexcode"])
        if group == "component" or subgroup in _LEFT_OUT_SUBGROUPS:
            continue
        if _LEFT_OUT.search(label.lower()):
            continue
        name = concept_name(label)
        concepts.append(
            Concept(
                hexcode=bare(hexcode),
                name=name,
                tags=tuple(str(tag) for tag in entry.get("tags", ())),
                group=group,
                subgroup=subgroup,
                weight=weight_of(group, subgroup, name, hexcode),
                flippable=flippable_of(group, subgroup, name),
                split=split_of(name),
                keys=_keys(label, hexcode, codes),
            )
        )
    return concepts


def _keys(
    label: str, hexcode: str, codes: Iterable[Mapping[str, str | list[str]]]
) -> tuple[str, ...]:
    """Names of one concept, the most certain first."""
    names = [label, label.replace("flag: ", "flag for ")]
    points = bare(hexcode).split("-")
    if len(points) == 1:
        names.append(unicodedata.name(chr(int(points[0], 16)), ""))
    for table in codes:
        found = table.get(hexcode, [])
        names.extend([found] if isinstance(found, str) else found)
    return tuple(dict.fromkeys(key for key in map(squash, names) if key))


def match_names(concepts: Iterable[Concept], files: Iterable[str]) -> dict[str, str]:
    """Return hexcode to file name, each file used once, surest keys matched first.

    ``files`` are names such as ``"dog-face"``; a trailing ``-default`` (yellow skin) is ignored.
    """
    by_key: dict[str, str] = {}
    for file in files:
        by_key.setdefault(squash(file.removesuffix("-default")), file)
    concepts = list(concepts)
    matched: dict[str, str] = {}
    used: set[str] = set()
    for rank in range(max((len(c.keys) for c in concepts), default=0)):
        for concept in concepts:
            if rank >= len(concept.keys) or concept.hexcode in matched:
                continue
            found = by_key.get(concept.keys[rank])
            if found is not None and found not in used:
                matched[concept.hexcode] = found
                used.add(found)
    return matched
