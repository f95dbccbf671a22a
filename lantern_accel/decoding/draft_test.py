"""Tests one draft: what it counts for under an acceptance rule, and the distribution after a rejection.

All decisions are float32 tensors of fixed shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.rule import Rule
from lantern_accel.strategy.rules import Tried

#: Smaller sums of weights than this are taken for nothing.
TINY = 1e-38


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


def normalise(weights: Tensor, fallback: Tensor) -> Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    share = weights / total.clamp(min=TINY)
    # Of nothing the shares are nothing, too.
    return share if fallback is weights else torch.where(total > 0, share, fallback)


@dataclass(frozen=True)
class DraftTest:
    """Drafts ``x [...]``, each against the target's distribution ``p [..., V]`` of its place.

    ``q [..., V]`` is what x was sampled from, earlier siblings removed; None where it is certain (q = 1).
    ``mass [...]`` is A(x), at most what the budget allows; ``near, near_mass [..., >= k]`` the
    neighbours; ``absorbed [...]`` how many of them count, None without relaxation.
    """

    p: Tensor
    q: Tensor | None
    x: Tensor
    px: Tensor
    qx: Tensor
    mass: Tensor
    near: Tensor | None
    near_mass: Tensor
    absorbed: Tensor | None

    @property
    def probability(self) -> Tensor:
        """The probability with which the draft is kept, ``min(1, A(x) / q(x))``."""
        return (self.mass / self.qx.clamp(min=TINY)).clamp(max=1.0)

    @property
    def quality_loss(self) -> Tensor:
        """What the test adds to the total variation (:func:`lift`)."""
        return lift(self.px, self.mass, self.qx)


def lift(px: Tensor, mass: Tensor, qx: Tensor) -> Tensor:
    """Return ``min(1, A / q) - min(1, p / q)`` of drafts, what their tests add to the total variation.

    Its mean over drafts is ``sum_x [min(q, A) - min(q, p)]``, the distance of one sampled draft.
    """
    share = qx.clamp(min=TINY)
    return (mass / share).clamp(max=1.0) - (px / share).clamp(max=1.0)


def examine(
    rule: Rule,
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    depth: int | Tensor,
    left: Tensor | None,
    codes: Tensor | None = None,
    qx: Tensor | None = None,
) -> DraftTest:
    """Look up what testing drafts needs; ``left [...]``: what each may use (:func:`allowance`).

    ``codes``: what :meth:`.Rule.codes` makes of ``x``, and ``qx``, where they are known.
    """
    if codes is None:
        codes = rule.codes(x)
    if qx is None:
        qx = torch.ones(x.shape, device=p.device) if q is None else weight_of(q, x)
    found = p.gather(-1, codes)
    px, near_mass = found[..., 0], found[..., 1:]
    if not rule.relaxed:
        return DraftTest(p, q, x, px, qx, px, None, near_mass, None)
    near = codes[..., 1:] if codes.shape[-1] > 1 else None
    k = rule.acceptance.k
    absorbed, extra = rule.count_neighbours(Tried(px, qx, near_mass[..., :k], p, x, depth, q))
    mass = px + extra
    if left is not None:
        mass = torch.minimum(mass, px + left * qx)
    return DraftTest(p, q, x, px, qx, mass, near, near_mass, absorbed)


def weight_of(rows: Tensor, x: Tensor) -> Tensor:
    """Return what ``rows [..., V]`` hold of codes ``x [...]``."""
    return rows.gather(-1, x.unsqueeze(-1)).squeeze(-1)


def residual(rule: Rule, test: DraftTest, allowed: Tensor | None = None) -> Tensor:
    """Return the target's distribution after a draft was rejected, float32 ``[..., V]``.

    ``allowed [..., V]``: 1 of codes that the token may be; None: any.
    """
    p, q = test.p, test.q
    column = test.x.unsqueeze(-1)
    near, absorbed = test.near, test.absorbed
    if rule.residual == "official":
        drafted = q
        if near is not None and absorbed is not None:
            wide = near[..., : rule.acceptance.k + 1]
            hit = (absorbed > 0).unsqueeze(-1)
            if drafted is None:
                p = torch.where(hit, p.scatter(-1, wide, 0.0), p)
            else:
                drafted = torch.where(hit, drafted.scatter(-1, wide, 0.0), drafted)
        rest = p.scatter(-1, column, 0.0) if drafted is None else (p - drafted).clamp(min=0.0)
        # The official code falls back to all codes alike: here, to all that may stand in this place.
        even = torch.ones_like(p) if allowed is None else allowed.float()
        return normalise(rest, even / even.sum(dim=-1, keepdim=True))
    target = p
    if rule.residual == "aggregate" and near is not None and absorbed is not None:
        k = rule.acceptance.k
        kept = test.near_mass[..., :k].masked_fill(rule.order < absorbed.unsqueeze(-1), 0)
        target = p.scatter(-1, near[..., :k], kept)
    if q is None:
        # A draft that is certain takes all that x counts for.
        return normalise(target.scatter(-1, column, 0.0), p)
    if rule.residual == "optimal":
        # f(y) = min(1, A(y) / q(y)). For sampled drafts q f = min(q, A), and since A >= p, what is left
        # of p is max(0, p - q), whatever A is.
        return normalise((p - q).clamp(min=0.0), p)
    if rule.relaxed:
        target = target.scatter(-1, column, test.mass.unsqueeze(-1))
    return normalise((target - q).clamp(min=0.0), p)


def residual_loss(rule: Rule, test: DraftTest, after: Tensor) -> Tensor:
    """Return what a less than ideal residual adds to the quality loss of a rejection, ``[...]``."""
    if test.q is not None:
        ideal = normalise((test.p - test.q).clamp(min=0.0), test.p)
        return (after - ideal).clamp(min=0.0).sum(dim=-1)
    refused = (1.0 - test.probability).unsqueeze(-1)
    rest = test.p.scatter(-1, test.x.unsqueeze(-1), 0.0)
    over = (refused * after - rest).clamp(min=0.0).sum(dim=-1)
    return over / refused.squeeze(-1).clamp(min=1e-6)
