"""Computes what a draft counts for under an acceptance rule, with the rule's numbers as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lantern_accel.device.plan import AcceptanceRule
from lantern_accel.strategy.rules import Acceptance, Tried
from lantern_accel.strategy.values import Residual

#: Smaller sums of weights than this are taken for nothing.
TINY = 1e-38


@dataclass(frozen=True)
class Rule:
    """An acceptance rule on a device.

    ``neighbours``: integer ``[V, >= k]``, None for a rule that reads none. ``runtime_params``: float32,
    the values of the rule that are data (see :class:`AcceptanceRule`); None takes the rule's own.
    ``budget``: float32 ``[1]``, the most total variation that a token may cost; None for no limit.
    ``order``: int32 ``[k]``, the neighbours' numbers, where they are made once.
    """

    acceptance: Acceptance
    residual: Residual = "aggregate"
    neighbours: Tensor | None = None
    runtime_params: Tensor | None = None
    budget: Tensor | None = None
    order: Tensor | None = None
    given: AcceptanceRule = field(init=False, repr=False, compare=False)
    """What the device's operations and plans take."""

    def __post_init__(self) -> None:
        acceptance = self.acceptance
        given = AcceptanceRule(
            acceptance.kind,
            self.relaxed,
            self.residual,
            acceptance.k,
            self.neighbours,
            self.runtime_params,
            self.budget,
        )
        object.__setattr__(self, "given", given)

    @property
    def relaxed(self) -> bool:
        reads = self.acceptance.k > 0
        return self.acceptance.relaxed and (self.neighbours is not None or not reads)

    def borrowed(self, tried: Tried) -> tuple[Tensor, Tensor]:
        """Return how many neighbours count and the mass that they add (:class:`AcceptanceRule`)."""
        runtime_params = self.runtime_params
        if runtime_params is None:
            runtime_params = torch.tensor(self.acceptance.runtime_values(), device=tried.px.device)
        return self.acceptance.borrowed(tried, runtime_params)

    def codes(self, x: Tensor) -> Tensor:
        """Return codes ``x [...]``, each with its neighbours behind it where the rule reads some."""
        column = x.unsqueeze(-1)
        if self.neighbours is None or not self.acceptance.k or not self.relaxed:
            return column
        near = self.neighbours.index_select(0, x.flatten()).to(x.dtype).view(*x.shape, -1)
        return torch.cat((column, near), dim=-1)

    def absorbs(self, count: Tensor) -> Tensor:
        """Return which neighbours are among the ``count [...]`` nearest, bool ``[..., k]``."""
        order = self.order
        if order is None:
            order = torch.arange(self.acceptance.k, dtype=torch.int32, device=count.device)
        return order < count.unsqueeze(-1)


def allowance(left: Tensor, p: Tensor, q: Tensor | None) -> Tensor:
    """Return how much one draft may use where ``left [...]`` is left of a token's budget.

    Drafts with ``q <= p`` are kept without relaxation and use nothing; their share goes to the
    others, so that the mean over drafts sampled from ``q [..., V]`` is ``left`` at most. A certain
    draft (None) has no share to take.
    """
    if q is None:
        return left
    spends = torch.where(q > p, q, 0.0).sum(dim=-1)
    return (left / spends.clamp(min=TINY)).clamp(max=1.0)
