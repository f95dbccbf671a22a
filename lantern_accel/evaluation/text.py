"""Ambiguity of text, to compare with that of images: an n-gram model of English prose, made here.

The prose is what every Python carries: the language reference in ``pydoc_data.topics``. Tokens are
byte-pair pieces, as many as the image model has codes. An n-gram model is far weaker than a language
model, so text is flatter here than it would be under one: the comparison is a lower bound.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import torch

from lantern_accel.quality.scoring import Ambiguity

ORDER = 5
SOURCE = (
    "measured here: interpolated Witten-Bell 5-gram of byte-pair tokens over Python's own language "
    "reference (pydoc_data.topics), held-out tenth; weaker than a language model, so flatter"
)


def corpus() -> str:
    """Return the prose of this Python's language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class NGram:
    """Interpolated n-gram model with Witten-Bell weights (IEEE Trans. Inf. Theory 37, 1991)."""

    def __init__(self, tokens: list[int], vocabulary: int, order: int = ORDER) -> None:
        self.vocabulary, self.order = vocabulary, order
        self._after: list[dict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(order)
        ]
        for i, token in enumerate(tokens):
            for n in range(min(order, i + 1)):
                self._after[n][tuple(tokens[i - n : i])][token] += 1

    def distribution(self, context: list[int]) -> list[float]:
        """Return the probabilities of all tokens after ``context``."""
        p = [1.0 / self.vocabulary] * self.vocabulary
        for n in range(self.order):
            seen = self._after[n].get(tuple(context[len(context) - n :]))
            if n > len(context) or seen is None:
                break
            total, kinds = sum(seen.values()), len(seen)
            keep = kinds / (total + kinds)
            p = [keep * value for value in p]
            for token, count in seen.items():
                p[token] += count / (total + kinds)
        return p


def text_ambiguity(vocabulary: int, positions: int, seed: int) -> Ambiguity:
    """Measure next-token distributions of English prose over ``vocabulary`` byte-pair tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = corpus()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocabulary, 300),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokens = tokenizer.encode(text).ids
    size = tokenizer.get_vocab_size()
    cut = len(tokens) * 9 // 10
    model = NGram(tokens[:cut], size)
    places = range(cut + ORDER, len(tokens))
    chosen = random.Random(seed).sample(places, min(positions, len(places)))
    figures = []
    for i in chosen:
        p = sorted(model.distribution(tokens[i - ORDER : i]), reverse=True)
        figures.append((p[0], sum(p[:10]), -sum(x * math.log(x) for x in p if x > 0)))
    rows = torch.tensor(figures, dtype=torch.float64).t()
    return Ambiguity.over(rows, of="text: English prose", source=SOURCE, vocabulary=size)
