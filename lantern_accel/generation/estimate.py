"""Estimates the speed of a draft source from timed steps and counted tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from lantern_accel.records import Frozen
from lantern_accel.strategy.lengths import in_batch
from lantern_accel.strategy.sources import with_tokens_per_step
from lantern_accel.strategy.values import Strategy


class Estimate(Frozen):
    """The estimate of a draft source: a strategy whose lengths have tokens per step and costs.

    ``times``: the shortest step by length, in milliseconds. ``exact``: for relaxed strategies, the tokens
    per step of exact decoding with the same drafts.
    """

    strategy: Strategy
    times: dict[int, float] = Field(default_factory=dict)
    exact: float | None = None

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        times: Mapping[int, Sequence[float]],
        tokens: Mapping[int, float] | None = None,
    ) -> Estimate:
        """Build an estimate from step times in milliseconds by draft length; length 1 is required.

        ``tokens``: tokens per step by length, for lengths without them.
        """
        lengths = with_tokens_per_step(strategy.lengths, tokens or {})
        least = {n: min(ms) for n, ms in times.items()}
        made = cls(strategy=strategy.with_drafts(draft_lengths=lengths), times=least)
        return made.weighed(least[1])

    def weighed(self, plain: float) -> Estimate:
        """Return the estimate with costs from its times. A length without a time keeps its cost.

        ``plain``: the shortest plain step of any source, in milliseconds. A length costs no more than a
        longer one, because other load makes times longer, never shorter.
        """
        least, costs = math.inf, {1: 1.0}
        for length in sorted(self.times.keys() - {1}, reverse=True):
            costs[length] = least = min(least, max(1.0, self.times[length] / plain))
        lengths = tuple(
            one.model_copy(update={"cost": costs.get(one.length, one.cost)})
            for one in self.strategy.lengths
        )
        strategy = self.strategy.with_drafts(draft_lengths=lengths)
        return self.model_copy(update={"strategy": strategy})

    def promise(self, images: int) -> float:
        """Return the predicted speed of a batch at the best timed length, over plain decoding."""
        return max(
            in_batch(one.tokens_per_step or 1.0, images) / one.cost
            for one in self.strategy.lengths
            if one.cost is not None
        )
