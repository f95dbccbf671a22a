"""Captions of training images, and the text tokenizer that is built from their words."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lantern_accel.families.llamagen.words import normalise

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNK = "[PAD]", "[UNK]"
"""Special tokens of the text tokenizer; their ids are 0 and 1."""

STYLES = (
    "noto",
    "twemoji",
    "fluent 3d",
    "fluent flat",
    "fluent modern",
    "noto v1",
    "fxemoji",
    "emojione",
)
"""Style words that a caption can carry, one per image set."""

FRAMES = (
    "a {}",
    "{} emoji",
    "an emoji of a {}",
    "a picture of a {}",
    "picture of {}",
    "icon of {}",
)

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_FACE = re.compile(r"^(.+) face$")


class Captioned(Protocol):
    """What a caption is drawn from, such as a ``lantern_accel.training.data.Record``."""

    @property
    def style(self) -> str: ...
    @property
    def concept(self) -> str: ...
    @property
    def tags(self) -> Sequence[str]: ...
    @property
    def group(self) -> str: ...


def spoken_name(record: Captioned, rng: random.Random) -> str:
    """Return a record's concept, or at times the animal's name alone for an animal's face."""
    face = _FACE.match(record.concept)
    if face and record.group == "animals-nature" and rng.random() < 0.4:
        return face.group(1)
    return record.concept


def plain_caption(record: Captioned, default_style: str | None = None) -> str:
    """Return the shortest caption that means ``record``: its concept, and its style if unusual."""
    if default_style in (None, record.style):
        return record.concept
    return f"{record.concept} {record.style} style"


def caption(record: Captioned, rng: random.Random, default_style: str | None = None) -> str:
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
        text = _styled(name, record, rng)
    elif kind < 0.84 and record.tags:
        count = min(len(record.tags), rng.choice((1, 1, 2)))
        text = " ".join([name, *rng.sample(list(record.tags), count)])
    else:
        text = rng.choice(FRAMES).format(name)
    if default_style not in (None, record.style) and record.style not in text:
        text = _styled(text, record, rng)
    return normalise(text)


def _styled(text: str, record: Captioned, rng: random.Random) -> str:
    return rng.choice(("{n} {s} style", "{s} {n}", "{n} {s}")).format(n=text, s=record.style)


def word_corpus(records: Iterable[Captioned], phrases: Iterable[str] = ()) -> list[str]:
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


def train_text_tokenizer(texts: Iterable[str], vocab_size: int = 3000) -> Tokenizer:
    """Build a WordPiece tokenizer from normalised ``texts``; [PAD] is 0 and [UNK] is 1.

    A quarter of the vocabulary is letters and common word pieces, so that any Latin word can be
    spelt; the rest are the most frequent whole words. The same texts in any order give the same
    file. The caller normalises text before encoding; the tokenizer splits on spaces only.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Counter(word for text in texts for word in normalise(text).split())
    entries = [PAD, UNK, *_LETTERS, *("##" + letter for letter in _LETTERS)]
    entries += _most_common(_pieces(words), max(vocab_size // 4 - len(entries), 0))
    entries += _most_common(words, vocab_size)
    vocabulary = {entry: i for i, entry in enumerate(list(dict.fromkeys(entries))[:vocab_size])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK, max_input_chars_per_word=64))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _pieces(words: Counter[str]) -> Counter[str]:
    """Count the beginnings and the later parts of two to five letters, by the letters they save."""
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(len(word)):
            for end in range(start + 2, min(start + 5, len(word)) + 1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                pieces[piece] += count * (end - start - 1)
    return pieces


def _most_common(counts: Counter[str], number: int) -> list[str]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [entry for entry, _ in ranked[:number]]


def save_text_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write ``tokenizer`` as JSON to ``path``, whole or not at all."""
    from lantern_accel.files import write_whole

    text = tokenizer.to_str(pretty=False)
    write_whole(path, lambda stream: stream.write(text.encode("utf-8")))
