"""Composed scenes: what they show, what they are called, and which are held out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lantern_accel.errors import DataError
from lantern_accel_profiles.evaluation import grid as prompts
from lantern_emoji import catalogue, scenes
from lantern_emoji.captions import STYLES
from lantern_emoji.data import EmojiDataset, Record
from lantern_emoji.scenes import Part, Scene

NAMES = ("red apple", "dog face", "star", "house", "violin")


def things() -> EmojiDataset:
    """Five discs of different colours, two image sets of them."""
    yy, xx = np.mgrid[:64, :64] - 31.5
    disc = (np.hypot(xx, yy) < 28)[..., None]
    colours = [(200, 20, 20), (150, 100, 50), (250, 220, 60), (90, 90, 90), (120, 60, 20)]
    images, records = [], []
    for style in ("noto", "twemoji"):
        for name, colour in zip(NAMES, colours, strict=True):
            images.append(np.where(disc, np.array(colour), 255).astype(np.uint8))
            records.append(
                Record(
                    index=len(records), style=style, concept=name, tags=(), group="animals-nature",
                    subgroup="x", hexcode=name, weight=1.0, flippable=True,
                    split=catalogue.split_of(name),
                )
            )  # fmt: skip
    coverage = np.repeat((disc[..., 0] * 255).astype(np.uint8)[None], len(images), 0)
    return EmojiDataset(np.stack(images), records, {}, coverage)


def scene(*parts: Part, relation: scenes.Relation = "beside", background: str = "white") -> Scene:
    return Scene(parts, relation, background, scenes.COLOURS[background], "train")


def test_the_same_seed_draws_the_same_scenes_and_never_a_held_out_concept() -> None:
    data = things()
    drawn = scenes.draw_scenes(data, 300, seed=3)
    assert drawn == scenes.draw_scenes(data, 300, seed=3)
    assert drawn != scenes.draw_scenes(data, 300, seed=4)
    assert {s.relation for s in drawn} == {"alone", "beside", "above", "pair above"}
    assert {len(s.parts) for s in drawn} == {1, 2, 3}
    shown = {data.records[p.record].concept for s in drawn for p in s.parts}
    assert shown == {"red apple", "dog face", "star", "house"}
    one_style = [{data.records[p.record].style for p in s.parts} for s in drawn]
    assert all(len(styles) == 1 for styles in one_style)


def test_a_pairing_is_held_out_whatever_the_order() -> None:
    pairs = [(f"a {i}", f"b {i}") for i in range(400)]
    one = [scenes.scene_split([a, b], "white", [None, None]) for a, b in pairs]
    other = [scenes.scene_split([b, a], "white", [None, None]) for a, b in pairs]
    assert one == other
    assert 0.03 < one.count("heldout") / 400 < 0.09
    assert scenes.scene_split(["thing"], "white", [None]) == "train"


def test_the_forty_prompts_are_what_they_are_called() -> None:
    assert (len(prompts.SEEN), len(prompts.HELD_OUT_CONCEPTS)) == (20, 10)
    assert len(set(prompts.FORTY)) == 40
    assert set(prompts.SEEN) <= set(catalogue.COMMON)
    assert all(catalogue.split_of(name) == "train" for name in prompts.SEEN)
    assert all(catalogue.split_of(name) == "heldout" for name in prompts.HELD_OUT_CONCEPTS)
    for prompt in prompts.HELD_OUT_COMPOSITIONS:
        concepts, background, dyes = _read(prompt)
        assert all(catalogue.split_of(c) == "train" for c in concepts), prompt
        assert scenes.scene_split(concepts, background, dyes) == "heldout", prompt


def _read(prompt: str) -> tuple[list[str], str, list[str | None]]:
    text, _, background = prompt.partition(" on ")
    for relation in (" left of ", " above "):
        if relation in text:
            return text.split(relation), background or "white", [None, None]
    first, _, rest = text.partition(" ")
    if first in scenes.HUES and text not in catalogue.COMMON:
        return [rest], background or "white", [first]
    return [text], background or "white", [None]


def test_pixels_are_where_and_what_the_scene_says() -> None:
    data = things()
    two = scenes.render_scene(data, scene(Part(0, 16, 32, 28), Part(1, 48, 32, 28)))
    assert two.shape == (64, 64, 3)
    assert two[32, 16].tolist() == [200, 20, 20]
    assert two[32, 48].tolist() == [150, 100, 50]
    assert two[2, 2].tolist() == two[60, 32].tolist() == [255, 255, 255]
    card = scenes.render_scene(
        data, scene(Part(0, 32, 32, 30), relation="alone", background="blue")
    )
    assert card[6, 32].tolist() == list(scenes.COLOURS["blue"])
    assert card[32, 32].tolist() == [200, 20, 20]
    assert card[0, 0].tolist() == [255, 255, 255]


def test_a_dye_changes_the_hue_and_keeps_grey_things_grey() -> None:
    data = things()
    dyed = scenes.render_scene(data, scene(Part(0, 32, 32, 40, dye="blue"), relation="alone"))
    r, g, b = dyed[32, 32].tolist()
    assert b == 200
    assert b > g > r
    grey = scenes.render_scene(data, scene(Part(3, 32, 32, 40, dye="blue"), relation="alone"))
    assert grey[32, 32].tolist() == [90, 90, 90]
    drawer = scenes._Drawer(data, random.Random(0))
    assert {drawer.dye(data.records[0]) for _ in range(60)} == {None}  # "red apple" says its own
    assert {drawer.dye(data.records[3]) for _ in range(60)} == {None}  # grey has no hue to change
    assert len({drawer.dye(data.records[1]) for _ in range(200)}) > 4


def test_captions_say_relation_background_and_colour() -> None:
    data = things()
    records = {r.index: r for r in data.records}
    rng = random.Random(0)
    pair = scene(Part(0, 16, 32, 28), Part(1, 48, 32, 28, dye="green"), background="blue")
    said = {scenes.scene_caption(pair, records, rng) for _ in range(200)}
    assert "red apple left of green dog face on blue" in said
    assert any(text.startswith("green dog right of red apple") for text in said)
    assert not any("dog face left of" in text or "red apple right of" in text for text in said)
    above = scene(Part(2, 32, 16, 28), Part(3, 32, 48, 28), relation="above")
    said = {scenes.scene_caption(above, records, rng) for _ in range(200)}
    assert {"star above house", "house below star"} <= said
    assert not any("house above" in text or "star below" in text for text in said)


def test_scenes_of_other_styles_than_the_default_say_theirs() -> None:
    data = things()
    records = {r.index: r for r in data.records}
    rng, style = random.Random(0), data.records[0].style
    alone = scene(Part(0, 32, 32, 28), relation="alone")
    other = next(name for name in STYLES if name != style)
    said = [scenes.scene_caption(alone, records, rng, other) for _ in range(50)]
    assert all(f"{style} style" in text for text in said)
    said = [scenes.scene_caption(alone, records, rng, style) for _ in range(50)]
    assert not all(f"{style} style" in text for text in said)


def test_data_without_coverage_or_pictures_is_refused() -> None:
    data = things()
    with pytest.raises(DataError, match=r"lantern-emoji data. again"):
        scenes.draw_scenes(EmojiDataset(data.images, data.records), 1, 0)
    few = EmojiDataset(data.images[:1], data.records[:1], {}, data.coverage[:1])  # type: ignore[index]
    with pytest.raises(DataError, match="too few"):
        scenes.draw_scenes(few, 1, 0)
