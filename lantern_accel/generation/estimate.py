"""Estimates the speed of a source of drafts from steps that were timed and tokens that were counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from lantern_accel.records import Frozen
from lantern_accel.strategy.lengths import (
    costs_of,
    in_batch,
    rate_of_counts,
    shifted_by_counts,
    tokens_of,
)
from lantern_accel.strategy.values import Strategy

#: The predicted speed-up that drafts need: costs of a few steps are uncertain by a tenth.
ENOUGH = 1.15
#: Steps for which the tokens per step that were known beforehand count: those of about three images,
#: since prompts differ more from one another than an image's steps do; a quarter of that where they are
#: another temperature's or most models'.
KNOWN_STEPS, USUAL_STEPS = 600, 150
#: Requests whose steps are timed and whose images are counted; after them a choice is final. A machine
#: may be busy during one.
REQUESTS = 4
#: The share of the best predicted speed that a source needs to be timed again.
NEAR = 0.7


class Estimate(Frozen):
    """A source of drafts: a strategy whose lengths have costs and tokens per step, and where from.

    ``times``: the least milliseconds that a step took, by length; ``counts``: tokens gained and steps,
    by length; ``known``: tokens per step by length before anything was counted, which count for
    ``weight`` steps; none for a copy of the weights, of which one rate of acceptance says everything.
    """

    strategy: Strategy
    times: dict[int, float] = Field(default_factory=dict)
    counts: dict[int, tuple[int, int]] = Field(default_factory=dict)
    known: dict[int, float] = Field(default_factory=dict)
    weight: float = USUAL_STEPS

    def with_times(self, times: Mapping[int, Sequence[float]]) -> Estimate:
        """Return it with more times in milliseconds: the least count, since noise makes none shorter."""
        found = {n: min(more) for n, more in times.items() if more}
        least = {n: min(ms, self.times.get(n, ms)) for n, ms in found.items()}
        return self.model_copy(update={"times": self.times | least})

    def with_counts(self, counts: Mapping[int, Sequence[int]]) -> Estimate:
        """Return it with more tokens gained and steps, by length."""
        found = dict(self.counts)
        for n, (gained, steps) in counts.items():
            before = found.get(n, (0, 0))
            found[n] = before[0] + gained, before[1] + steps
        return self.model_copy(update={"counts": found})

    def weighed(self, plain: float) -> Estimate:
        """Return it with the costs and tokens per step that follow from what was timed and counted.

        ``plain``: milliseconds of a plain step, the least that was timed with any source.
        """
        lengths = [one.length for one in self.strategy.lengths]
        if self.known:
            brings = shifted_by_counts(self.known, self.counts, self.weight)
        else:
            rate = rate_of_counts(self.counts)
            brings = {n: tokens_of(rate, n) for n in lengths} if self.counts else {}
        times = {n: [ms] for n, ms in (self.times | {1: plain}).items()}
        costs = {one.length: one for one in costs_of(self.strategy.lengths, times)}
        made = (
            costs.get(one.length, one).model_copy(
                update={"tokens_per_step": brings.get(one.length, one.tokens_per_step)}
            )
            for one in self.strategy.lengths
        )
        return self.model_copy(
            update={"strategy": self.strategy.with_drafts(draft_lengths=tuple(made))}
        )

    def promise(self, images: int) -> float:
        """Return the predicted speed of a batch at the best timed length, over plain decoding."""
        return max(
            in_batch(one.tokens_per_step or 1.0, images) / one.cost
            for one in self.strategy.lengths
            if one.cost is not None
        )

    def drafts_as(self, strategy: Strategy) -> bool:
        """Return whether a strategy's drafts come from this source."""
        return self.strategy.drafts.origin == strategy.drafts.origin


class Comparison(Frozen):
    """The sources that were timed for a batch, over the first ``requests`` of their kind."""

    sources: tuple[Estimate, ...]
    requests: int = 1

    @property
    def open(self) -> bool:
        """Whether later requests may still change what is chosen."""
        return self.requests < REQUESTS

    def weighed(self) -> Comparison:
        """Return it with every source weighed against the least plain step."""
        plain = min(one.times[1] for one in self.sources)
        return self.model_copy(update={"sources": tuple(s.weighed(plain) for s in self.sources)})

    def best(self, images: int) -> Estimate:
        """Return the source predicted fastest for a batch, the first of equals."""
        return max(self.sources, key=lambda one: one.promise(images))

    def near(self, one: Estimate, images: int) -> bool:
        """Return whether a source may yet turn out to be the fastest, or faster than plain decoding."""
        return one.promise(images) >= NEAR * max(ENOUGH, self.best(images).promise(images))

    def counted(self, strategy: Strategy, counts: Mapping[int, Sequence[int]]) -> Comparison:
        """Return it with the counts of images that were generated with ``strategy``: :attr:`.counts`."""
        sources = (
            one.with_counts(counts) if one.drafts_as(strategy) else one for one in self.sources
        )
        return self.model_copy(update={"sources": tuple(sources)})
