"""Chooses the fastest length by acceptance counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lantern_accel.strategy.lengths import (
    MOST_SHIFT,
    SURE,
    in_batch,
    shift_odds,
    usual_tokens_per_step,
)
from lantern_accel.strategy.sources import DraftLength

#: Steps over which acceptance is averaged: that of one image, and what sets an image of a batch apart.
MEMORY, OWN_MEMORY = 16, 48
#: Plain steps of one image after which a third is left of what was learned.
REST = 64
#: A length is left where another is predicted this much faster: after a move a window takes some
#: steps until its drafts settle. For a longer one, which settles best, the second number is enough.
GAIN, RISE = 1.1, 1.05
#: The same as :data:`GAIN` for chains, which are drafted again in every step.
CHAIN_GAIN = 1.02


@dataclass(frozen=True)
class LengthStats:
    """Steps of one length: how many, the tokens that each image gained, and those that it still lacks."""

    length: int
    steps: int
    gained: tuple[int, ...]
    left: tuple[int, ...]


@dataclass
class AcceptancePolicy:
    """The length predicted to complete a batch soonest, given how many drafts were accepted of late.

    It sees counts alone, so that no draft's distribution depends on it.

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
        self._usual = {
            one.length: one.tokens_per_step or usual_tokens_per_step(one.length)
            for one in self.draft_lengths
        }

    def begin(self) -> int:
        """Return the longest of the lengths that usually are fastest, within :attr:`gain`."""
        self.shift, self.own, self.now = 0.0, [], 0
        self.now = self.best(None)
        return self.now

    def observe(self, block: LengthStats) -> int:
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
        """Forget what was learned of a row, which another image takes."""
        if self.own:
            self.own[row] = 0.0

    def _off(self, block: LengthStats, gained: float, own: float, memory: float) -> float:
        """Return what tokens that were gained in a block add to a shift, which held ``own`` more."""
        expected = self.predict(block.length, own)
        share = 1 - (1 - 1 / memory) ** block.steps
        # To first order the tokens beyond one go with the odds.
        return share * (gained / block.steps - expected) / max(expected - 1, 0.5)

    def predict(self, length: int, own: float = 0.0) -> float:
        """Return the tokens that a step of this length is expected to add to an image now."""
        return shift_odds(self._usual[length], length, self.shift + own)

    def _tokens(self, length: int, left: Sequence[int]) -> float:
        """Return the tokens per step that the farthest image gets until the last one is complete."""
        own = self.own or [0.0] * len(left)
        steps = [lacks / self.predict(length, own[i]) for i, lacks in enumerate(left) if lacks]
        return max(left) / max(1.0, *steps) if steps else 1.0

    def best(self, left: Sequence[int] | None) -> int:
        """Return the length to go on with, where images lack this many tokens; None: all of them.

        Only one predicted to be a little faster than plain decoding.
        """
        speed = {}
        for one in self.draft_lengths:
            worth = self.predict(one.length) if left is None else self._tokens(one.length, left)
            speed[one.length] = in_batch(worth, self.images) / (one.cost or 1.0)
        most, plain = max(speed.values()), speed.get(1, 0.0)
        sure = {n: SURE * plain if n > 1 else plain for n in speed}
        good = [n for n in speed if sure[n] <= speed[n] and most < self.gain * speed[n]] or [1]
        if self.now not in good:
            return max(good)
        return max([self.now, *(n for n in good if speed[n] >= RISE * speed[self.now])])
