"""Turns a request's sampling settings into what the device's sampling operations take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.plan import Filter
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.values import Sampling


@dataclass(frozen=True)
class Draws:
    """A device's draws; ``sums``: of its :class:`.Tables`, if anything."""

    ops: SamplingOps = REFERENCE
    sums: tuple[Tensor, ...] = ()

    def draw(self, weights: Tensor, uniform: Tensor) -> Tensor:
        """Draw codes of the shape of ``uniform``, as :meth:`.SamplingOps.draw` does."""
        return self.ops.draw(weights, uniform, *self.sums)


@dataclass(frozen=True)
class Filters:
    """How logits become a distribution in a step: what has a shape, and the values that are data.

    ``temperature`` and ``top_p``: float32 ``[1]`` on the device, or numbers. ``ops``: the device's
    operations; ``sums`` as in :class:`Draws`.
    """

    sampling: Sampling
    temperature: Tensor | float
    top_p: Tensor | float
    ops: SamplingOps = field(default=REFERENCE)
    sums: Tensor | None = field(default=None, repr=False, compare=False)
    given: Filter = field(init=False, repr=False, compare=False)
    """What the device's operation takes; of use where sampling is not greedy."""
    draws: Draws = field(init=False, repr=False, compare=False)
    tables: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    """What the device's filter looks up (:class:`.Tables`), if anything."""

    def __post_init__(self) -> None:
        # Made here, not when it is first read: a compiler that traces a step cannot enter a lock.
        s, never = self.sampling, None
        if isinstance(self.temperature, Tensor):
            never = torch.full_like(self.temperature, float("-inf"))
        given = Filter(
            temperature=self.temperature,
            top_k=s.top_k,
            top_p=self.top_p if s.top_p < 1 else None,
            p_first=s.order == "top_p_first",
            never=never,
        )
        object.__setattr__(self, "given", given)
        sums = () if self.sums is None else (self.sums,)
        object.__setattr__(self, "draws", Draws(self.ops, sums))
        made = None
        if isinstance(self.temperature, Tensor):
            made = self.ops.tables(0, self.temperature.device).filter
        object.__setattr__(self, "tables", () if made is None else (made,))

    @classmethod
    def of(cls, sampling: Sampling) -> Filters:
        """Return the filters of settings as numbers."""
        return cls(sampling, sampling.temperature, sampling.top_p)


def distribution(logits: Tensor, filters: Filters | Sampling) -> Tensor:
    """Return float32 probabilities ``[..., V]`` after temperature and the two filters.

    Greedy decoding (temperature 0) leaves the logits as they are: its rule compares probabilities of
    the raw distribution.
    """
    if isinstance(filters, Sampling):
        filters = Filters.of(filters)
    if filters.sampling.greedy:
        return logits.softmax(dim=-1)
    return filters.ops.filter(logits, filters.given, *filters.tables)
