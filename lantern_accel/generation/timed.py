"""A source of drafts that was timed: what its lengths cost and bring, and what speed that promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from lantern_accel.decoding.length_policy import (
    in_batch,
    rate_of_counts,
    shifted_by_counts,
    tokens_of,
    with_costs,
)
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import SelfDrafts, Strategy

#: What counts of a drafter's drafts, next to other sources: how often it is right differs from prompt to
#: prompt three times as much as for windows, and the first images show few prompts.
CAREFUL = 0.9
#: Steps after which what a drafter's tree or chain brings is a first figure.
DRAFTER_STEPS = 48
#: What is known of a source's lengths beforehand counts for so many steps, or for those of so many images
#: once some were drawn: prompts differ more from one another than an image's steps do. What is known of
#: another temperature, or of most models, counts for a quarter of that.
PRIOR_STEPS, PRIOR_IMAGES = 200, 3
#: Images after which a source that was known to pay may be given up: each of them falls back on plain
#: steps where drafts are bad, which costs little, and a choice is kept.
FEWEST_IMAGES = 4


class Timed(BaseModel):
    """A source of drafts whose steps were timed: its strategy with the costs and the worth of lengths.

    ``counts``: tokens gained and steps, by length, over ``images``, where its drafts were counted;
    those of plain steps between them only where images were drawn. ``prior``: tokens per step by length
    that were known before, which count for ``sure`` steps or more; none for a copy. ``times``: the least
    milliseconds that a step took, by length; empty: not kept, and costs stay as they are.
    """

    model_config = ConfigDict(extra="forbid")

    strategy: Strategy
    counts: dict[int, list[int]] = {}
    images: int = 0
    prior: dict[int, float] = {}
    sure: float = PRIOR_STEPS
    times: dict[int, float] = {}

    @property
    def plain(self) -> float | None:
        """Milliseconds of the plain step that was timed beside the others; None: not kept."""
        return self.times.get(1)

    def timed_again(self, times: Mapping[int, Sequence[float]]) -> Timed:
        """Return it with the times of later steps counted in, milliseconds by length.

        The least time counts: whatever else a machine does makes times long, and never short.
        """
        found = {n: min(more) for n, more in times.items() if more}
        least = {n: min(ms, self.times.get(n, ms)) for n, ms in found.items()}
        return self.model_copy(update={"times": self.times | least})

    def relative_to(self, plain: float) -> Timed:
        """Return it with costs relative to a plain step of ``plain`` ms, the least of all sources'.

        Plain steps are bound by memory, whose pace changes with what else a machine does: a source
        that was timed beside slow ones would look cheaper than it is.
        """
        if self.plain is None:
            return self
        tree: Any = self.strategy.drafts
        times = {n: [ms] for n, ms in (self.times | {1: plain}).items()}
        tree = tree.model_copy(update={"draft_lengths": with_costs(tree.draft_lengths, times)})
        return self.model_copy(
            update={"strategy": self.strategy.model_copy(update={"drafts": tree})}
        )

    @property
    def draft_lengths(self) -> tuple[DraftLength, ...]:
        """The lengths whose cost is known."""
        tree: Any = self.strategy.drafts
        return tuple(one for one in tree.draft_lengths if one.cost is not None)

    def weighed(self) -> Timed:
        """Return it with the worth that was counted.

        A copy's is that of chains of one rate of acceptance. What was known of other sources is shifted,
        the odds of every length alike, so that those that were counted bring what they brought.
        """
        if not self.counts:
            return self
        tree: Any = self.strategy.drafts
        lengths = [one.length for one in tree.draft_lengths]
        if self.prior:
            # An image whose drafts are bad takes more steps, and counts for no more than others.
            each = self._steps / self.images if self.images else 0.0
            sure = self.sure * max(1.0, PRIOR_IMAGES * each / PRIOR_STEPS)
            worth = shifted_by_counts(self.prior, self.counts, sure)
        else:
            rate = rate_of_counts(self.counts)
            worth = {length: tokens_of(rate, length) for length in lengths}
        draft_lengths = tuple(
            one.model_copy(update={"tokens_per_step": worth.get(one.length, one.tokens_per_step)})
            for one in tree.draft_lengths
        )
        tree = tree.model_copy(update={"draft_lengths": draft_lengths})
        return self.model_copy(
            update={"strategy": self.strategy.model_copy(update={"drafts": tree})}
        )

    def drafts_as(self, strategy: Strategy) -> bool:
        """Return whether a strategy's drafts come from this source."""
        own: Any = self.strategy.drafts
        other: Any = strategy.drafts
        if not isinstance(own, SelfDrafts) or not isinstance(other, SelfDrafts):
            return type(own) is type(other)
        return (own.weights, own.window) == (other.weights, other.window)

    @property
    def _steps(self) -> int:
        """Steps with drafts that were counted."""
        return sum(steps for length, (_, steps) in self.counts.items() if length > 1)

    @property
    def young(self) -> bool:
        """Whether it was known to pay, and too few images were drawn to say that it does not."""
        return bool(self.prior) and 0 < self.images < FEWEST_IMAGES

    @property
    def certainty(self) -> float:
        """What its promise counts, next to those of other sources."""
        return CAREFUL if self.strategy.needs_drafter else 1.0

    def promise(self, images: int) -> float:
        """Return the speed that the best length promises a batch, relative to plain decoding."""
        return max(
            in_batch(p.tokens_per_step or 1.0, images) / (p.cost or 1.0) for p in self.draft_lengths
        )

    def speed(self, images: int) -> float:
        """Return the speed to expect of a batch: what the steps that were counted came to.

        The best length's promise, which counts for some steps, knows nothing of steps that are plain
        since its drafts were bad.
        """
        costs = {p.length: p.cost or 1.0 for p in self.draft_lengths}
        counted = {n: found for n, found in self.counts.items() if n in costs}
        if not self.images or not counted:
            return self.promise(images)
        best = max(
            self.draft_lengths,
            key=lambda p: in_batch(p.tokens_per_step or 1.0, images) / (p.cost or 1.0),
        )
        gained, steps = (float(sum(found[i] for found in counted.values())) for i in (0, 1))
        spent = sum(found[1] * costs[n] for n, found in counted.items())
        promised = max(DRAFTER_STEPS, self._steps / self.images)  # as much as an image's
        gained += promised * (best.tokens_per_step or 1.0)
        spent += promised * (best.cost or 1.0)
        steps += promised
        return in_batch(gained / steps, images) * steps / spent

    def count(self, counted: Mapping[int, Sequence[int]]) -> None:
        """Count an image's steps in, or a batch's: tokens gained and steps by length."""
        for length, (gained, steps) in counted.items():
            before = self.counts.get(length, [0, 0])
            self.counts[length] = [before[0] + gained, before[1] + steps]
