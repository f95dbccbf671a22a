"""Estimates the tokens per step of draft lengths, and their costs, from what was counted and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from lantern_accel.strategy.sources import DraftLength

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


def _most(below: Callable[[float], bool], low: float, high: float) -> float:
    """Return the most, between two numbers, of which ``below`` still holds, by halving."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


def rate_of(tokens: float, length: int) -> float:
    """Return the rate at which a window of ``length`` has this many tokens per step."""
    return _most(lambda rate: tokens_of(rate, length) < tokens, 0.0, 1.0)


@lru_cache(maxsize=1024)
def _odds_of(tokens: float, length: int) -> float:
    """Return the odds at which drafts are accepted, of the rate that :func:`rate_of` returns."""
    rate = min(max(rate_of(tokens, length), 1e-4), 1 - 1e-4)
    return rate / (1 - rate)


def shifted(tokens: float, length: int, shift: float) -> float:
    """Return the tokens per step of a window that usually has ``tokens``, its odds shifted.

    ``shift``: a logarithm, of which no more than :data:`MOST_SHIFT` counts.
    """
    odds = _odds_of(tokens, length) * math.exp(min(max(shift, -MOST_SHIFT), MOST_SHIFT))
    return tokens_of(odds / (1 + odds), length) if length > 1 else tokens


def odds_between(usual: float, found: float, length: int) -> float:
    """Return the shift with which a window that usually adds ``usual`` tokens adds ``found``."""
    return math.log(_odds_of(found, length) / _odds_of(usual, length))


def rate_of_counts(counts: Mapping[int, Sequence[int]]) -> float:
    """Return the rate at which chains of several lengths give the counts, as one rate for all.

    ``counts``: tokens gained and steps, by length.
    """
    gained = sum(tokens for tokens, _ in counts.values())

    def brings(rate: float) -> float:
        return sum(steps * tokens_of(rate, length) for length, (_, steps) in counts.items())

    return _most(lambda rate: brings(rate) < gained, 0.0, 1.0)


def shifted_by_counts(
    known: Mapping[int, float], counts: Mapping[int, Sequence[int]], sure: float
) -> dict[int, float]:
    """Return tokens per step by length, with one shift of all odds at which drafts are accepted.

    The shift is that with which the counted lengths give their counts. ``known``: what they give without
    one, which counts for as many steps as ``sure`` says; ``counts``: tokens gained and steps, by length.
    """
    steps = {n: spent for n, (_, spent) in counts.items() if n in known and n > 1}
    total = sum(steps.values())
    if not total:
        return dict(known)
    # What is known beforehand is spread over the lengths as the steps were.
    gained = sum(counts[n][0] + sure * steps[n] / total * known[n] for n in steps)

    def brings(shift: float) -> float:
        return sum((1 + sure / total) * steps[n] * shifted(known[n], n, shift) for n in steps)

    shift = _most(lambda shift: brings(shift) < gained, -MOST_SHIFT, MOST_SHIFT)
    return {n: shifted(tokens, n, shift) for n, tokens in known.items()}


def costs_of(
    draft_lengths: Sequence[DraftLength], times: Mapping[int, Sequence[float]]
) -> tuple[DraftLength, ...]:
    """Return the lengths that were timed, with their costs relative to the shortest's step.

    ``times``: of every length round by round. A cost is the least time over the least of the shortest's:
    whatever else a machine does makes times long, and never short. For the same reason no length is
    taken to cost more than a longer one.
    """
    known = sorted((p for p in draft_lengths if times.get(p.length)), key=lambda one: one.length)
    if not known:
        return tuple(draft_lengths)
    plain = min(times[known[0].length])
    least, out = math.inf, []
    for one in reversed(known):
        least = min(least, max(1.0, min(times[one.length]) / plain))
        out.append(one.model_copy(update={"cost": least}))
    return tuple(reversed(out))
