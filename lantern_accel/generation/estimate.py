"""Estimates the speed of a source of drafts from steps that were timed and tokens that were counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from lantern_accel.records import Frozen
from lantern_accel.strategy.lengths import in_batch
from lantern_accel.strategy.sources import with_tokens_per_step
from lantern_accel.strategy.values import Strategy

#: The predicted speed-up that drafts need: costs of a few steps are uncertain by a tenth.
ENOUGH = 1.15


class Estimate(Frozen):
    """A source of drafts: a strategy whose lengths have tokens per step and costs.

    ``times``: the least milliseconds that a step took, by length. ``exact``: of relaxed drafts, the
    tokens per step that exact decoding had with them, counted alike.
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
        """Return that of steps whose ``times`` were taken by length, plain ones among them.

        ``tokens``: per step by length, for what is not known.
        """
        lengths = with_tokens_per_step(strategy.lengths, tokens or {})
        least = {n: min(ms) for n, ms in times.items()}
        made = cls(strategy=strategy.with_drafts(draft_lengths=lengths), times=least)
        return made.weighed(least[1])

    def weighed(self, plain: float) -> Estimate:
        """Return it with the costs that follow from its times; a length without one keeps its cost.

        ``plain``: milliseconds of a plain step, the least that was timed with any source. No length is
        taken to cost more than a longer one: what else a machine does makes times long, never short.
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
