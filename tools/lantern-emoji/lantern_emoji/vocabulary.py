"""The vocabulary of the text tokenizer: words of the captions, letters and pieces of words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lantern_accel.families.llamagen.words import normalise

PAD, UNK = "[PAD]", "[UNK]"
"""Special tokens of the text tokenizer; their ids are 0 and 1."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def train_text_tokenizer(texts: Iterable[str], vocab_size: int = 3000) -> Tokenizer:
    """Build a WordPiece tokenizer from normalised ``texts``; [PAD] is 0 and [UNK] is 1.

    A quarter of the vocabulary is letters and common word pieces, so that any Latin word can be
    spelt; the rest are the most frequent whole words. The same texts in any order give the same
    file. The caller normalises text before encoding; the tokenizer splits on spaces only.
    """
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
