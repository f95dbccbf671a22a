"""Acceptance rules from papers that neither train a drafter for them nor need a table of neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lantern_accel.strategy.rules import AcceptanceRule, Tried

if TYPE_CHECKING:
    from torch import Tensor


class Annealed(AcceptanceRule):
    """Cool-SD (arXiv 2601.09212): a draft counts for more than its probability, less so farther on.

    ``A(x) = w_d p(x)`` with a weight that falls from level to level d,
    ``w_d = 1 + (weight - 1) decay^d``. That the weight should fall, and that the residual should be
    ``max(0, p - q)``, is the paper's. It has no code: this schedule and its constants are ours.
    """

    kind: Literal["cool-sd"] = "cool-sd"
    k: Literal[0] = 0
    weight: float = Field(
        2.0, ge=1, le=1e30, allow_inf_nan=False, description="weight of the first draft, 1: exact"
    )
    decay: float = Field(
        0.8, ge=0, le=1, allow_inf_nan=False, description="what is left of weight - 1 a draft later"
    )
    runtime_params: ClassVar[tuple[str, ...]] = ("weight", "decay")

    def borrowed(self, tried: Tried, runtime_params: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(weight - 1) decay^d p(x)``, and that no neighbour counts."""
        import torch

        more = (runtime_params[0] - 1.0) * runtime_params[1] ** tried.depth
        return torch.zeros_like(tried.px, dtype=torch.int32), more * tried.px


class Grouped(AcceptanceRule):
    """GSD (arXiv 2508.07747): codes of nearly the same rank and probability are tested as one.

    The group of x are the codes of at most ``reach`` ranks more or less than x in p whose probability is
    within ``close`` of p(x). ``A(x) = q(x) P / Q`` with what p and q give to the group, and at least
    p(x): the paper's ratio can be below ``p(x) / q(x)``, where it would refuse more than the exact test
    does. Its third condition, on distances of the output layer's rows, is left out.
    """

    kind: Literal["gsd"] = "gsd"
    k: Literal[0] = 0
    reach: int = Field(7, ge=1, le=64, description="ranks on either side of a code's own")
    close: float = Field(0.15, gt=0, le=1, description="most that probabilities of a group differ")
    runtime_params: ClassVar[tuple[str, ...]] = ("close",)
    reads_distribution: ClassVar[bool] = True

    def borrowed(self, tried: Tried, runtime_params: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``max(0, q(x) P / Q - p(x))``, and that no neighbour's own mass is taken."""
        import torch

        p, px, code = tried.p, tried.px, tried.x.unsqueeze(-1)
        nothing = torch.zeros_like(px, dtype=torch.int32)
        # Where all codes of one row are asked about, it is one row, seen many times.
        same = p.dim() > 1 and p.shape[-2] > 1 and p.stride(-2) == 0
        rows = p.narrow(-2, 0, 1) if same else p
        order = rows.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(p.shape[-1], device=p.device).expand_as(order)
        ranks = torch.zeros_like(order).scatter(-1, order, ranks)
        order = order.to(code.dtype).expand(p.shape)
        place = ranks.expand(p.shape).gather(-1, code).squeeze(-1)
        around = torch.arange(-self.reach, self.reach + 1, dtype=torch.int32, device=p.device)
        at = place.unsqueeze(-1) + around
        inside = (at >= 0) & (at < p.shape[-1])
        codes = order.gather(-1, at.clamp(min=0, max=p.shape[-1] - 1).to(order.dtype))
        mass = p.gather(-1, codes)
        inside = inside & ((mass - px.unsqueeze(-1)).abs() < runtime_params[0])
        mine = torch.where(inside, mass, 0.0).sum(dim=-1)
        if tried.q is None:  # the draft is certain: all of q is its own
            return nothing, mine - px
        theirs = torch.where(inside, tried.q.gather(-1, codes), 0.0).sum(dim=-1)
        group = tried.qx * mine / theirs.clamp(min=1e-38)
        return nothing, (group - px).clamp(min=0.0)
