"""Composed scenes: what they show, what they are called, and which are held out."""

from __future__ import annotations

import random

import numpy as np

from lantern_emoji import catalogue, scenes
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
