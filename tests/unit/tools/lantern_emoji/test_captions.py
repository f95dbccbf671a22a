"""Captions, normalisation and the text tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tokenizers import Tokenizer

from lantern_accel.families.llamagen.words import normalise
from lantern_emoji.captions import (
    STYLES,
    caption,
    word_corpus,
)
from lantern_emoji.data import Record
from lantern_emoji.vocabulary import train_text_tokenizer


def record(concept: str, group: str = "food-drink", tags: tuple[str, ...] = ("ripe",)) -> Record:
    made = SimpleNamespace(concept=concept, style="noto v1", tags=tags, group=group)
    return cast(Record, made)


def test_captions_are_normalised_and_mostly_the_name() -> None:
    rng = random.Random(0)
    drawn = [caption(record("Red apple"), rng) for _ in range(400)]
    assert all(text == normalise(text) and "red apple" in text for text in drawn)
    assert 0.4 < sum(text == "red apple" for text in drawn) / 400 < 0.6
    kinds = ("noto v1 red apple", "red apple ripe", "a picture of a red apple")
    assert all(kind in drawn for kind in kinds)


def test_the_text_tokenizer_knows_whole_words_and_spells_others(tmp_path: Path) -> None:
    texts = word_corpus([record(name) for name in ("red apple", "green apple", "blue whale")])
    path = tmp_path / "text_tokenizer.json"
    train_text_tokenizer(texts, vocab_size=400).save(str(path), pretty=False)
    tokenizer = Tokenizer.from_file(str(path))
    assert (tokenizer.token_to_id("[PAD]"), tokenizer.token_to_id("[UNK]")) == (0, 1)
    known = "a picture of a red apple"
    assert tokenizer.encode(known).tokens == known.split()
    assert all(1 not in tokenizer.encode(style).ids for style in STYLES)
    spelt = tokenizer.encode("zebra")
    assert 1 not in spelt.ids
    assert tokenizer.decode(spelt.ids) == "zebra"
