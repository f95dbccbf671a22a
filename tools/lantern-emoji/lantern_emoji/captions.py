"""Captions of the training images: names, tags, styles and the frames around them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_accel.families.llamagen.words import normalise
from lantern_accel.files import read_lines

if TYPE_CHECKING:
    from lantern_emoji.data import Record

STYLES = (
    "noto", "twemoji", "fluent 3d", "fluent flat", "fluent modern", "noto v1", "fxemoji", "emojione",
)  # fmt: skip
"""Style words that a caption can carry, one per image set."""

FRAMES = (
    "a {}", "{} emoji", "an emoji of a {}", "a picture of a {}", "picture of {}", "icon of {}",
)  # fmt: skip

_FACE = re.compile(r"^(.+) face$")


def spoken_name(record: Record, rng: random.Random) -> str:
    """Return a record's concept, or at times the animal's name alone for an animal's face."""
    face = _FACE.match(record.concept)
    if face and record.group == "animals-nature" and rng.random() < 0.4:
        return face.group(1)
    return record.concept


def plain_caption(record: Record, default_style: str | None = None) -> str:
    """Return the shortest caption that means ``record``: its concept, and its style if unusual."""
    if default_style in (None, record.style):
        return record.concept
    return f"{record.concept} {record.style} style"


def caption(record: Record, rng: random.Random, default_style: str | None = None) -> str:
    """Draw one normalised training caption of ``record``.

    About half are the bare concept; the rest add the style, one or two tags, or a frame such as
    "a picture of a ...". Animal faces are also called by the animal's name alone. With a
    ``default_style``, pictures of every other style say theirs.
    """
    name = spoken_name(record, rng)
    kind = rng.random()
    if kind < 0.50:
        text = name
    elif kind < 0.72:
        text = _add_style(name, record, rng)
    elif kind < 0.84 and record.tags:
        count = min(len(record.tags), rng.choice((1, 1, 2)))
        text = " ".join([name, *rng.sample(list(record.tags), count)])
    else:
        text = rng.choice(FRAMES).format(name)
    if default_style not in (None, record.style) and record.style not in text:
        text = _add_style(text, record, rng)
    return normalise(text)


def _add_style(text: str, record: Record, rng: random.Random) -> str:
    return rng.choice(("{n} {s} style", "{s} {n}", "{n} {s}")).format(n=text, s=record.style)


def word_corpus(records: Iterable[Record], phrases: Iterable[str] = ()) -> list[str]:
    """Return every text that a caption can be built from; names count ten times as much as tags.

    ``phrases``: what captions say besides names and frames; these words are always known whole.
    """
    frames = [normalise(frame.format("")) for frame in FRAMES] + list(STYLES) + ["style"]
    frames += [normalise(phrase) for phrase in phrases]
    texts = []
    for record in records:
        texts.extend([normalise(record.concept)] * 10)
        texts.extend(normalise(tag) for tag in record.tags)
    return texts + frames * 1000


def prompts_of(count: int, seed: int) -> list[str]:
    """Return prompts of ``prompts.txt``, a quarter of them pairs of its short ones, for a draft head.

    None is in ``composed.txt`` or among the built-in prompts, on which heads are judged.
    """
    from lantern_accel.generation.built_in_prompts import REPORTING, TUNING

    lists = Path(__file__).resolve().parents[1]
    left_out = {"", *TUNING, *REPORTING, *read_lines(lists / "composed.txt")}
    lines = [line for line in read_lines(lists / "prompts.txt") if line not in left_out]
    short = [line for line in lines if len(line.split()) <= 2]
    rng, found = random.Random(seed), list[str]()
    while len(found) < count:
        pair = rng.random() < 0.25
        one = f"{rng.choice(short)} and {rng.choice(short)}" if pair else rng.choice(lines)
        if one not in left_out:
            found.append(one)
    return found
