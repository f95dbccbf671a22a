"""Maximal coupling: tests a window's drafts, and replaces those that fail.

Draft ``x[i]`` was drawn from ``q[i]``; the pass gives ``p[i]``, the distribution that it should have been
drawn from. Testing x[i] with ``u q(x) < p(x)``, and where that fails drawing from what is left,
``norm(max(0, p - q))``, gives a token that is distributed as p[i], whatever q[i] was. The target's
own distribution follows for the drafts up to the first that is replaced: they, and the replacement,
were judged by the right past. The later ones were judged by drafts, but each is distributed as its own
p[i] given those, so that q[i] := p[i] is what they were drawn from when the next pass tests them.

Source: SCD (arXiv 2510.24211) for going on behind the first replacement, SJD (2410.01699) for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.accept import examine, residual, residual_price, row_at
from lantern_accel.decoding.logits import Draws
from lantern_accel.decoding.rule import Rule, allowance


@dataclass(frozen=True)
class Coupled:
    """One step's outcome for ``B`` images and the ``L`` positions behind the last known token.

    ``tokens`` integer ``[B, L]``: the new ones, the bonus last; ``count`` integer ``[B]`` or ``[1]``: how
    many of them are known now, 1 to L; ``price`` float32 ``[B, L - 1]``: what relaxation cost the token
    of each tried draft (:class:`~.accept.Accepted`), None where nothing was tried.
    """

    tokens: Tensor
    count: Tensor
    price: Tensor | None


def leading(accepted: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the drafts before the first that is not kept, ``[B]`` from bool ``[B, T]``."""
    order = torch.arange(accepted.shape[1], dtype=dtype, device=accepted.device)
    return order.masked_fill(accepted, accepted.shape[1]).amin(dim=1)


def couple(
    x: Tensor,
    p: Tensor,
    q: Tensor,
    rule: Rule,
    tests: Tensor,
    draws: Tensor,
    *,
    anew: bool = False,
    drawing: Draws | None = None,
) -> Coupled:
    """Test the drafts and replace what fails.

    ``x`` integer ``[B, L - 1]``; ``p`` float32 ``[B, L, V]``, of which the last is the bonus's; ``q``
    float32 ``[B, L - 1, V]``; ``tests`` uniforms ``[B, L - 1]``, ``draws`` others ``[B, L]``. With a
    relaxed ``rule`` A(x) decides what is known and the tail goes on under the exact test. ``anew``: the
    tail is drawn from p instead (SJD). ``drawing``: a device's draws; None: the reference's.
    """
    drawing = drawing or Draws()
    done = None if rule.relaxed else drawing.ops.couple(x, p, q, tests, draws, anew)
    if done is not None:
        return Coupled(*done, torch.zeros(x.shape, device=x.device))
    own, bonus = p[:, :-1], p[:, -1:]
    code = x.unsqueeze(-1)
    px, qx = own.gather(-1, code).squeeze(-1), q.gather(-1, code).squeeze(-1)
    kept = tests * qx < px
    known = kept
    price = torch.zeros_like(px)
    order = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    if rule.relaxed:
        most = None if rule.budget is None else allowance(rule.budget.expand_as(px), own, q)
        every = examine(rule, own, q, x, order, most, qx=qx)
        known, price = tests * qx < every.mass, every.price
    count = leading(known, x.dtype)
    before = order < count.unsqueeze(1)
    left = (own - q).clamp(min=0.0)
    # Where p is q to the last bit nothing is left; then the draw is p's.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, own)
    if anew:
        left = torch.where((order > count.unsqueeze(1)).unsqueeze(-1), own, left)
        kept = kept & before
    first = count.clamp(max=x.shape[1] - 1)
    if rule.relaxed:
        here, drafted = row_at(own, first), row_at(q, first)
        limit = None
        if rule.budget is not None:
            limit = allowance(rule.budget.expand(len(x)), here, drafted)
        test = examine(rule, here, drafted, row_at(code, first).squeeze(-1), first, limit)
        row = residual(rule, test, here > 0)
        hit = order == count.unsqueeze(1)
        left = torch.where(hit.unsqueeze(-1), row.unsqueeze(1), left)
        if rule.residual == "official":
            price = price + torch.where(hit, residual_price(rule, test, row).unsqueeze(1), 0.0)
        # What the relaxed test keeps is known; what it refuses, the exact test refuses too.
        kept = kept | before
    drawn = drawing.draw(torch.cat((left, bonus), dim=1), draws)
    tokens = torch.cat((torch.where(kept, x, drawn[:, :-1]), drawn[:, -1:]), dim=1)
    price = price.masked_fill(order > count.unsqueeze(1), 0)
    return Coupled(tokens, count + 1, price)


def compare(x: Tensor, scores: Tensor, rule: Rule) -> Coupled:
    """Keep the drafts that are the likeliest code, up to the first that is not: relaxed greedy decoding.

    ``x`` integer ``[B, L - 1]``; ``scores [B, L, V]``: logits. A draft counts for A(x) of a relaxed
    ``rule``. Exactly, tokens are compared as noise's are (:class:`~.sources.window.InvariantWindow`).
    """
    best = scores.argmax(dim=-1).to(x.dtype)
    own = best[:, :-1]
    likeliest = x == own
    p = scores[:, :-1].softmax(dim=-1)
    order = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    mass = examine(rule, p, None, x, order, None).mass
    top = p.gather(-1, own.unsqueeze(-1)).squeeze(-1)
    near = (mass > top) | ((mass == top) & (x < own))
    price = (near & ~likeliest).float()
    count = leading(likeliest | near, x.dtype)
    before = order < count.unsqueeze(1)
    tokens = torch.cat((torch.where(before, x, own), best[:, -1:]), dim=1)
    return Coupled(tokens, count + 1, torch.where(before, price, 0.0))
