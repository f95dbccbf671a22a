"""An acceptance rule with its tensors on a device.

LANTERN (arXiv 2410.03355) and LANTERN++ (2502.06352) let near neighbours of a drafted code count for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lantern_accel.device.plan import AcceptancePlan
from lantern_accel.strategy.rules import Acceptance, Tried
from lantern_accel.strategy.strategy import Residual


@dataclass(frozen=True)
class Rule:
    """An acceptance rule on a device.

    ``neighbours``: integer ``[V, >= k]``, None for a rule that reads none. ``runtime_params``: float32,
    the values of the rule that are data (see :class:`AcceptancePlan`); None takes the rule's own.
    ``budget``: float32 ``[1]``, the most total variation that a token may cost; None for no limit.
    """

    acceptance: Acceptance
    residual: Residual = "aggregate"
    neighbours: Tensor | None = None
    runtime_params: Tensor | None = None
    budget: Tensor | None = None
    order: Tensor = field(init=False, repr=False, compare=False)
    """The neighbours' numbers, int32 ``[k]``."""

    def __post_init__(self) -> None:
        device = None if self.neighbours is None else self.neighbours.device
        order = torch.arange(self.acceptance.k, dtype=torch.int32, device=device)
        object.__setattr__(self, "order", order)

    @property
    def given(self) -> AcceptancePlan:
        """What the device's operations and plans take."""
        rule = self.acceptance.kind, self.relaxed, self.residual, self.acceptance.k
        return AcceptancePlan(*rule, self.neighbours, self.runtime_params, self.budget)

    @property
    def relaxed(self) -> bool:
        reads = self.acceptance.k > 0
        return self.acceptance.relaxed and (self.neighbours is not None or not reads)

    def count_neighbours(self, tried: Tried) -> tuple[Tensor, Tensor]:
        """Return how many neighbours count and the mass that they add (:class:`AcceptancePlan`)."""
        runtime_params = self.runtime_params
        if runtime_params is None:
            runtime_params = torch.tensor(self.acceptance.runtime_values(), device=tried.px.device)
        return self.acceptance.count_neighbours(tried, runtime_params)

    def codes(self, x: Tensor) -> Tensor:
        """Return codes ``x [...]``, each with its neighbours behind it where the rule reads some."""
        column = x.unsqueeze(-1)
        if self.neighbours is None or not self.acceptance.k or not self.relaxed:
            return column
        near = self.neighbours.index_select(0, x.flatten()).to(x.dtype).view(*x.shape, -1)
        return torch.cat((column, near), dim=-1)
