"""Captioned compositions: one to three things with relations, on a background, in the colours named.

They multiply the little data there is and teach words that no emoji shows ("left of", "on blue").
A scene is drawn from a seed and described by numbers; ``render_scene`` makes its pixels.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.words import normalise
from lantern_emoji import catalogue
from lantern_emoji.captions import STYLES, spoken_name
from lantern_emoji.data import EmojiDataset, Record
from lantern_emoji.render import CONTENT, SIZE

Relation = Literal["alone", "beside", "above", "pair above"]

HELD_OUT_SHARE = 0.06
"""Share of pairs of concepts, of a concept and a background, and of a concept and a colour, that
no training scene shows."""

COLOURS: dict[str, tuple[int, int, int]] = {
    name: (r, g, b) for name, (r, g, b) in catalogue.LISTS["backgrounds"].items()
}
"""Backgrounds by name, RGB."""
HUES: dict[str, tuple[float, float, float]] = {
    name: (r, g, b) for name, (r, g, b) in catalogue.LISTS["hues"].items()
}
"""Full colours that a thing may be dyed in, by name."""

_COLOUR_WORDS = {*COLOURS, "rainbow", "golden", "grey", "broken"}
_DYED = {"animals-nature", "food-drink", "objects", "travel-places", "smileys-emotion"}


@dataclass(frozen=True)
class Part:
    """One thing: a record, where its middle is and how large it is (pixels), mirrored, dyed."""

    record: int
    x: int
    y: int
    size: int
    mirrored: bool = False
    dye: str | None = None


@dataclass(frozen=True)
class Scene:
    """One composition; ``relation`` says how ``parts`` are placed, in the order they are named."""

    parts: tuple[Part, ...]
    relation: Relation
    background: str
    rgb: tuple[int, int, int]
    split: str


def _held(*words: str) -> bool:
    digest = hashlib.sha256("|".join(sorted(words)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def scene_split(concepts: Sequence[str], background: str, dyes: Sequence[str | None]) -> str:
    """Return ``"heldout"`` where a pairing in the scene is one that training never shows."""
    pairs = [(a, b) for i, a in enumerate(concepts) for b in concepts[i + 1 :]]
    if background != "white":
        pairs += [(concept, f"on {background}") for concept in concepts]
    pairs += [(concept, f"in {dye}") for concept, dye in zip(concepts, dyes, strict=True) if dye]
    return "heldout" if any(_held(*pair) for pair in pairs) else "train"


def _mean_colour(data: EmojiDataset, index: int) -> NDArray[np.float64]:
    assert data.coverage is not None
    weight = data.coverage[index].astype(np.float64) / 255.0
    rgb = data.images[index].astype(np.float64) - 255.0 * (1.0 - weight[..., None])
    return np.asarray(rgb.sum((0, 1)) / max(weight.sum(), 1.0))


class _Drawer:
    """Draws scenes; things of one scene come from one image set."""

    def __init__(self, data: EmojiDataset, rng: random.Random) -> None:
        self.data, self.rng = data, rng
        chosen = [r for r in data.records if r.split == "train" and r.weight == 1.0]
        common = set(catalogue.COMMON)
        self.common = {
            s: [r for r in chosen if r.style == s and r.concept in common] for s in STYLES
        }
        self.other = {
            s: [r for r in chosen if r.style == s and r.group in _DYED and r.concept not in common]
            for s in STYLES
        }
        self.styles = [s for s in STYLES if len(self.common[s]) + len(self.other[s]) > 3]
        if not self.styles:
            raise DataError("the data has too few pictures to compose scenes of")

    def records(self, count: int) -> list[Record]:
        style = self.rng.choice(self.styles)
        found: list[Record] = []
        while len(found) < count:
            pools = [p for p in (self.common[style], self.other[style]) if p]
            pool = pools[0] if self.rng.random() < 0.75 else pools[-1]
            record = self.rng.choice(pool)
            if all(record.concept != other.concept for other in found) or len(pools[0]) < 3:
                found.append(record)
        return found

    def dye(self, record: Record) -> str | None:
        """Choose a colour for a thing whose name has none and whose pixels have one, or None."""
        words = set(record.concept.split())
        if self.rng.random() > 0.15 or record.group not in _DYED or words & _COLOUR_WORDS:
            return None
        mean = _mean_colour(self.data, record.index)
        return self.rng.choice(list(HUES)) if mean.max() - mean.min() > 50 else None

    def places(self, relation: Relation) -> list[tuple[int, int, int]]:
        """Return the middle and the size of each thing."""
        r = self.rng.randint
        if relation == "alone":
            size = r(38, 60)
            room = (SIZE - size) // 2
            return [(SIZE // 2 + r(-room, room) // 2, SIZE // 2 + r(-room, room) // 2, size)]
        if relation == "beside":
            return [(x + r(-1, 1), 32 + r(-4, 4), r(26, 31)) for x in (16, 48)]
        if relation == "above":
            return [(32 + r(-4, 4), y + r(-1, 1), r(26, 31)) for y in (16, 48)]
        spots = ((17, 17), (47, 17), (32, 47))
        return [(x + r(-1, 1), y + r(-1, 1), r(25, 29)) for x, y in spots]

    def background(self, records: list[Record]) -> tuple[str, tuple[int, int, int]]:
        """Choose a background that the things stand out from."""
        for _ in range(8):
            name = "white" if self.rng.random() < 0.25 else self.rng.choice(list(COLOURS))
            rgb = np.array(COLOURS[name])
            if name == "white":
                break
            rgb = np.clip(rgb + [self.rng.randint(-14, 14) for _ in range(3)], 0, 255)
            means = [_mean_colour(self.data, r.index) for r in records]
            if all(np.abs(mean - rgb).sum() > 130 for mean in means):
                break
        else:
            name, rgb = "white", np.array(COLOURS["white"])
        return name, (int(rgb[0]), int(rgb[1]), int(rgb[2]))

    def scene(self) -> Scene:
        kind = self.rng.random()
        relation: Relation = (
            "alone" if kind < 0.4 else "beside" if kind < 0.67 else "above" if kind < 0.9
            else "pair above"
        )  # fmt: skip
        records = self.records({"alone": 1, "pair above": 3}.get(relation, 2))
        dyes = [self.dye(record) for record in records]
        name, rgb = self.background(records)
        if relation == "alone" and name == "white" and dyes[0] is None:
            name, rgb = "blue", COLOURS["blue"]
        parts = tuple(
            Part(record.index, x, y, size, record.flippable and self.rng.random() < 0.5, dye)
            for record, dye, (x, y, size) in zip(records, dyes, self.places(relation), strict=True)
        )
        split = scene_split([record.concept for record in records], name, dyes)
        return Scene(parts, relation, name, rgb, split)


def draw_scenes(data: EmojiDataset, count: int, seed: int) -> list[Scene]:
    """Draw ``count`` scenes of training concepts; about a tenth of them are held out.

    Raises ``DataError`` where the data was rendered without coverage, or is too small.
    """
    if data.coverage is None:
        raise DataError(
            "the training images were rendered by a version without scenes (no coverage.npy); run "
            "`python tools/lantern-emoji data` again"
        )
    drawer = _Drawer(data, random.Random(seed))
    return [drawer.scene() for _ in range(count)]


def _shift_hue(rgb: NDArray[np.float32], colour: tuple[float, float, float]) -> NDArray[np.float32]:
    """Give colours ``[..., 3]`` another hue; their greyness and brightness stay."""
    low, high = rgb.min(-1, keepdims=True), rgb.max(-1, keepdims=True)
    return np.asarray(low + (high - low) * np.array(colour, np.float32), dtype=np.float32)


def render_scene(data: EmojiDataset, scene: Scene) -> NDArray[np.uint8]:
    """Return the pixels of a scene, uint8 ``[64, 64, 3]``."""
    assert data.coverage is not None
    canvas = np.full((SIZE, SIZE, 3), 255.0, np.float32)
    canvas += _tile() * (np.array(scene.rgb, np.float32) - 255.0)
    for part in scene.parts:
        cover = data.coverage[part.record]
        # Premultiplied by the coverage, so that resizing mixes nothing in from outside.
        own = data.images[part.record] - (np.float32(255.0) - cover[..., None].astype(np.float32))
        if part.dye is not None:
            own = _shift_hue(own, HUES[part.dye])
        stack = np.concatenate((own, cover[..., None].astype(np.float32)), axis=-1)
        if part.mirrored:
            stack = stack[:, ::-1]
        side = max(1, round(part.size * SIZE / CONTENT))
        channels = [
            np.asarray(
                Image.fromarray(np.ascontiguousarray(stack[..., c]), mode="F").resize(
                    (side, side),
                    Image.Resampling.BOX if side < SIZE // 2 else Image.Resampling.BICUBIC,
                )
            )
            for c in range(4)
        ]
        small = np.stack(channels, -1)
        _lay(canvas, small, part.x - side // 2, part.y - side // 2)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


@cache
def _tile() -> NDArray[np.float32]:
    """Coverage of a rounded square of 60 px, float32 ``[64, 64, 1]``: what a background fills.

    Emoji sets have a white margin, and a tokenizer that never saw a full bleed loses its colour.
    """
    large = Image.new("L", (4 * SIZE, 4 * SIZE), 0)
    edge = 4 * (SIZE - CONTENT) // 2
    ImageDraw.Draw(large).rounded_rectangle(
        (edge, edge, 4 * SIZE - 1 - edge, 4 * SIZE - 1 - edge), radius=40, fill=255
    )
    small = np.asarray(large.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)
    return small[..., None] / 255.0


def _lay(canvas: NDArray[np.float32], small: NDArray[np.float32], left: int, top: int) -> None:
    """Put premultiplied ``small [s, s, 4]`` onto the canvas; what does not fit is cut off."""
    side = len(small)
    x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + side, SIZE), min(top + side, SIZE)
    cut = small[y0 - top : y1 - top, x0 - left : x1 - left]
    alpha = np.clip(cut[..., 3:] / 255.0, 0.0, 1.0)
    canvas[y0:y1, x0:x1] = canvas[y0:y1, x0:x1] * (1.0 - alpha) + cut[..., :3]


_PHRASES: dict[Relation, tuple[str, ...]] = {
    "alone": ("{0}",),
    "beside": ("{0} left of {1}", "{1} right of {0}", "{0} left of a {1}", "{0} and {1}"),
    "above": ("{0} above {1}", "{1} below {0}", "{0} over {1}", "{1} under {0}", "{0} above a {1}"),
    "pair above": ("{0} and {1} above {2}", "{2} below {0} and {1}"),
}
SCENE_WORDS = (
    "left of", "right of", "above", "below", "over", "under", "and", "on a background", *COLOURS,
)  # fmt: skip
"""What scene captions say besides names; the text tokenizer learns them whole."""


def scene_caption(
    scene: Scene,
    records: Mapping[int, Record],
    rng: random.Random,
    default_style: str | None = None,
) -> str:
    """Draw one normalised caption of a scene; its background is nearly always named.

    With a ``default_style``, scenes of every other style say theirs.
    """
    names = []
    for part in scene.parts:
        name = spoken_name(records[part.record], rng)
        names.append(f"{part.dye} {name}" if part.dye else name)
    text = rng.choice(_PHRASES[scene.relation]).format(*names)
    if scene.background == "white":
        text += " on white" if rng.random() < 0.2 else ""
    elif scene.relation == "alone" or rng.random() < 0.85:
        form = rng.choice((" on {}", " on {}", " on a {} background", " {} background"))
        text += form.format(scene.background)
    style = records[scene.parts[0].record].style
    if rng.random() < 0.15 or default_style not in (None, style):
        text += f" {style} style"
    return normalise(text)
