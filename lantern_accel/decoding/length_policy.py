"""Chooses the fastest length by acceptance counts, and estimates the tokens per step of lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lantern_accel.decoding.policy import Block
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
#: Steps over which acceptance is averaged: that of one image, and what sets an image of a batch apart.
MEMORY, OWN_MEMORY = 16, 48
#: Plain steps of one image after which a third is left of what was learned.
REST = 64
#: The most that the odds of acceptance are taken to shift, as a logarithm.
MOST_SHIFT = 4.0
#: A length is left where another is predicted this much faster: after a move a window takes some
#: steps until its drafts settle. For a longer one, which settles best, the second number is enough.
GAIN, RISE = 1.1, 1.05
#: The predicted speed-up that drafting needs over plain decoding: costs change with the load.
SURE = 1.03
#: The share of its accepted drafts that a batch loses with every doubling, since its slowest image
#: counts: a quarter at four images was measured.
SPREAD = 0.12
#: The same as :data:`GAIN` for chains, which are drafted again in every step.
CHAIN_GAIN = 1.02


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


def _odds_of(tokens: float, length: int) -> float:
    """Return the odds at which drafts are accepted, of the rate that :func:`rate_of` returns."""
    rate = min(max(rate_of(tokens, length), 1e-4), 1 - 1e-4)
    return rate / (1 - rate)


def _shifted(odds: float, shift: float, length: int) -> float:
    """Return the tokens per step of a window, its odds shifted by a logarithm."""
    moved = odds * math.exp(shift)
    return tokens_of(moved / (1 + moved), length)


def shifted(tokens: float, length: int, shift: float) -> float:
    """Return the tokens per step of a window that usually has ``tokens``, its odds shifted."""
    return _shifted(_odds_of(tokens, length), shift, length) if length > 1 else tokens


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
    odds = {length: _odds_of(tokens, length) for length, tokens in known.items()}
    steps = {n: spent for n, (_, spent) in counts.items() if n in odds and n > 1}
    total = sum(steps.values())
    if not total:
        return dict(known)
    # What is known beforehand is spread over the lengths as the steps were.
    gained = sum(counts[n][0] + sure * steps[n] / total * known[n] for n in steps)

    def brings(shift: float) -> float:
        return sum((1 + sure / total) * steps[n] * _shifted(odds[n], shift, n) for n in steps)

    shift = _most(lambda shift: brings(shift) < gained, -MOST_SHIFT, MOST_SHIFT)
    return {n: _shifted(odds[n], shift, n) if n > 1 else known[n] for n in known}


@dataclass
class AcceptancePolicy:
    """The length predicted to complete a batch soonest, given how many drafts were accepted of late.

    Each length has a usual rate at which its drafts are accepted. A number, ``shift``, says by how much
    the odds of the last steps were better or worse than usual, and another per image, ``own``, how it
    differs from the batch; both hold for all lengths alike. A batch is complete when its last image is.
    ``gain``: the gain that a move needs, just over 1 where nothing settles. ``images``: a batch's.
    """

    draft_lengths: Sequence[DraftLength]
    gain: float = GAIN
    images: int = 1
    now: int = 0
    shift: float = field(default=0.0, init=False)
    own: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._odds = {
            one.length: _odds_of(
                one.tokens_per_step or usual_tokens_per_step(one.length), one.length
            )
            for one in self.draft_lengths
        }

    def begin(self) -> int:
        """Return the longest of the lengths that usually are fastest, within :attr:`gain`."""
        self.shift, self.own, self.now = 0.0, [], 0
        self.now = self.best(None)
        return self.now

    def observe(self, block: Block) -> int:
        """Return the length predicted to be fastest after a block's steps."""
        self.own = self.own or [0.0] * len(block.left)
        sure = math.sqrt(len(block.left))  # the mean of many images varies less
        # What an image gained in steps of which it did not need all says little.
        whole = [block.steps == 1 and gained > 0 for gained in block.gained]
        worked = [i for i, left in enumerate(block.left) if left or whole[i]]
        if block.length == 1:  # nothing was drafted: what was learned fades
            fades = (1 - 1 / (REST * sure)) ** block.steps
            self.shift *= fades
            self.own = [one * fades for one in self.own]
        elif worked:
            for i in worked:
                self.own[i] += self._off(block, block.gained[i], self.own[i], OWN_MEMORY)
            middle = sum(self.own[i] for i in worked) / len(worked)
            self.own = [one - middle for one in self.own]  # what all have in common is the shift's
            mean = sum(block.gained[i] for i in worked) / len(worked)
            self.shift += self._off(block, mean, 0.0, max(MEMORY / sure, 2.0))
            self.shift = min(max(self.shift, -MOST_SHIFT), MOST_SHIFT)
        self.now = self.best(block.left)
        return self.now

    def forget(self, row: int) -> None:
        if self.own:
            self.own[row] = 0.0

    def _off(self, block: Block, gained: float, own: float, memory: float) -> float:
        """Return what tokens that were gained in a block add to a shift, which held ``own`` more."""
        expected = self.promise(block.length, own)
        share = 1 - (1 - 1 / memory) ** block.steps
        # To first order the tokens beyond one go with the odds.
        return share * (gained / block.steps - expected) / max(expected - 1, 0.5)

    def promise(self, length: int, own: float = 0.0) -> float:
        """Return the tokens that a step of this length is expected to add to an image now."""
        shift = min(max(self.shift + own, -MOST_SHIFT), MOST_SHIFT)
        return _shifted(self._odds[length], shift, length)

    def _tokens(self, length: int, left: Sequence[int]) -> float:
        """Return the tokens per step that the farthest image gets until the last one is complete."""
        own = self.own or [0.0] * len(left)
        steps = [lacks / self.promise(length, own[i]) for i, lacks in enumerate(left) if lacks]
        return max(left) / max(1.0, *steps) if steps else 1.0

    def best(self, left: Sequence[int] | None) -> int:
        """Return the length to go on with, where images lack this many tokens; None: all of them.

        Only one predicted to be a little faster than plain decoding.
        """
        speed = {}
        for one in self.draft_lengths:
            worth = self.promise(one.length) if left is None else self._tokens(one.length, left)
            speed[one.length] = in_batch(worth, self.images) / (one.cost or 1.0)
        most, plain = max(speed.values()), speed.get(1, 0.0)
        sure = {n: SURE * plain if n > 1 else plain for n in speed}
        good = [n for n in speed if sure[n] <= speed[n] and most < self.gain * speed[n]] or [1]
        if self.now not in good:
            return max(good)
        return max([self.now, *(n for n in good if speed[n] >= RISE * speed[self.now])])


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
