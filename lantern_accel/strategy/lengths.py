"""Estimates the tokens per step of draft lengths, from what was counted or is usual."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

#: Tokens per step by length, where nothing was measured: the bundled model at temperature 1.
USUAL_TOKENS_PER_STEP = {
    1: 1.0,
    2: 1.45,
    4: 1.9,
    8: 2.3,
    12: 2.6,
    16: 2.9,
    24: 3.2,
    32: 3.4,
    64: 3.9,
}
#: The most that the odds of acceptance are taken to shift, as a logarithm.
MOST_SHIFT = 4.0
#: The predicted speed-up that drafting needs over plain decoding: costs change with the load.
SURE = 1.03
#: The share of its accepted drafts that a batch loses with every doubling, since its slowest image
#: counts: a quarter at four images was measured.
SPREAD = 0.12


def usual_tokens_per_step(length: int) -> float:
    """Return :data:`USUAL_TOKENS_PER_STEP` of a length, between its points by a line."""
    for (low, few), (high, many) in pairwise(USUAL_TOKENS_PER_STEP.items()):
        if length <= high:
            return few + (length - low) / (high - low) * (many - few)
    return max(USUAL_TOKENS_PER_STEP.values())


def in_batch(worth: float, images: int) -> float:
    """Return the tokens per step of the slowest of some images that have ``worth`` on average."""
    return 1.0 + (worth - 1.0) * max(1.0 - SPREAD * math.log2(images), 0.0)


def tokens_of(rate: float, length: float) -> float:
    """Return the tokens per step of a window whose drafts are each accepted at ``rate``, as a chain."""
    return float(length) if rate >= 1 else (1.0 - rate**length) / (1.0 - rate)


def rate_of(tokens: float, length: int) -> float:
    """Return the rate at which a window of ``length`` has this many tokens per step, by halving."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(middle, length) < tokens else (low, middle)
    return low


def tokens_at_one_rate(tokens: float, length: int, lengths: Iterable[int]) -> dict[int, float]:
    """Return tokens per step of ``lengths``, drafts accepted at the rate that one with ``tokens`` has."""
    rate = rate_of(tokens, length)
    return {n: tokens_of(rate, n) for n in lengths}


@lru_cache(maxsize=1024)
def _odds_of(tokens: float, length: int) -> float:
    """Return the odds at which drafts are accepted, of the rate that :func:`rate_of` returns."""
    rate = min(max(rate_of(tokens, length), 1e-4), 1 - 1e-4)
    return rate / (1 - rate)


def shift_odds(tokens: float, length: int, shift: float) -> float:
    """Return the tokens per step of a window that usually has ``tokens``, its odds shifted.

    ``shift``: a logarithm, of which no more than :data:`MOST_SHIFT` counts.
    """
    odds = _odds_of(tokens, length) * math.exp(min(max(shift, -MOST_SHIFT), MOST_SHIFT))
    return tokens_of(odds / (1 + odds), length) if length > 1 else tokens


def odds_between(usual: float, found: float, length: int) -> float:
    """Return the shift with which a window that usually adds ``usual`` tokens adds ``found``."""
    return math.log(_odds_of(found, length) / _odds_of(usual, length))


def compare_with_exact(exact: float, moved: float) -> str:
    """Say what exact decoding had with relaxed drafts: ``exact`` tokens per step.

    ``moved``: total variation per token, by which relaxation raises acceptance at most.
    """
    return (
        f"exact decoding with these drafts has {exact:.2f} tok/step; TV {moved:.3f} adds no more to "
        "acceptance"
    )
