"""The acceptance rules in plain Python and float64, for one image, as the papers' text tells them.

Greedy and sampling; exact, LANTERN and LANTERN++; the residuals aggregate, official and optimal;
drafts that are certain (q = 1) and drafts drawn without replacement. No tensors, no batching.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Vector = Sequence[float]


@dataclass
class OracleRule:
    """``bound``: delta of LANTERN or lambda of LANTERN++; ``near[x]``: codes by distance to x."""

    kind: Literal["exact", "lantern", "lantern++"] = "exact"
    residual: Literal["aggregate", "official", "optimal"] = "aggregate"
    k: int = 0
    bound: float = 0.0
    near: Sequence[Sequence[int]] = ()
    budget: float | None = None


@dataclass
class Verdict:
    """What one image keeps.

    ``trust`` says how far float32 can be believed: 1 at first, times the mass that each residual
    left; ``closest`` is the smallest distance of a decision to its threshold, scaled by the trust.
    """

    path: list[int] = field(default_factory=lambda: [0])
    next: list[float] = field(default_factory=list)
    quality_loss: float = 0.0
    trust: float = 1.0
    closest: float = math.inf

    def compare(self, left: float, right: float) -> None:
        self.closest = min(self.closest, abs(left - right) * self.trust)


def _absorb(rule: OracleRule, p: Vector, x: int, verdict: Verdict) -> tuple[int, float]:
    """Return J and c_J: the largest j with c_j <= B, and the mass of the first j neighbours."""
    if rule.kind == "exact":
        return 0, 0.0
    bound = rule.bound if rule.kind == "lantern" else (rule.bound - 1) * p[x]
    count, mass, total = 0, 0.0, 0.0
    for j in range(rule.k):
        step = p[rule.near[x][j]]
        total += step
        if step or total:
            verdict.compare(total, bound)
        if total <= bound:
            count, mass = j + 1, total
    return count, mass


def _normalised(weights: list[float], fallback: list[float], verdict: Verdict) -> list[float]:
    total = math.fsum(weights)
    if total <= 0:
        return fallback
    verdict.trust *= min(total, 1.0)
    return [w / total for w in weights]


def _without(q: Vector, x: int) -> list[float]:
    left = [0.0 if y == x else mass for y, mass in enumerate(q)]
    total = math.fsum(left)
    return [mass / total for mass in left] if total > 0 else left


def _after_rejection(
    rule: OracleRule, p: list[float], q: Vector | None, x: int, verdict: Verdict, whole: float
) -> list[float]:
    """Return the residual; ``whole`` is A(x) as the test used it."""
    count, mass = _absorb(rule, p, x, verdict)
    size = len(p)
    if rule.residual == "official":
        near = set(rule.near[x][: rule.k + 1]) if count else set()
        if q is None:
            left = [0.0 if y == x or y in near else p[y] for y in range(size)]
        else:
            left = [max(p[y] - (0.0 if y in near else q[y]), 0.0) for y in range(size)]
        return _normalised(left, [1.0 / size] * size, verdict)
    if rule.residual == "optimal":
        if q is None:
            taken = [min(1.0, whole) if y == x else 0.0 for y in range(size)]
        else:
            taken = []
            for y in range(size):
                relaxed = p[y] + _absorb(rule, p, y, verdict)[1]
                accepts = min(1.0, relaxed / q[y]) if q[y] > 0 else 0.0
                taken.append(q[y] * accepts)
        return _normalised([max(p[y] - taken[y], 0.0) for y in range(size)], p, verdict)
    relaxed_p = list(p)
    for y in rule.near[x][:count] if count else ():
        relaxed_p[y] = 0.0
    relaxed_p[x] += mass
    drafted = [float(y == x) for y in range(size)] if q is None else list(q)
    return _normalised([max(relaxed_p[y] - drafted[y], 0.0) for y in range(size)], p, verdict)


def _share(left: float, p: Vector, q: Vector | None) -> float:
    """Return what one draft may spend; drafts that p keeps anyway leave their part to the others."""
    if q is None:
        return left
    spends = math.fsum(b for a, b in zip(p, q, strict=True) if b > a)
    return min(1.0, left / spends) if spends > 0 else 1.0


def _cost(rule: OracleRule, p: list[float], q: Vector | None, x: int, mass: float) -> float:
    """Return what a test adds to the total variation: f(x) less what exact decoding would keep."""
    chance = 1.0 if q is None else q[x]
    return min(1.0, mass / chance) - min(1.0, p[x] / chance)


def _stray(
    rule: OracleRule, p: list[float], q: Vector | None, x: int, mass: float, after: list[float]
) -> float:
    """Return what the official residual adds where a draft is refused."""
    if rule.residual != "official" or rule.kind == "exact":
        return 0.0
    if q is None:
        lost = 1.0 - min(1.0, mass)
        rest = [0.0 if y == x else v for y, v in enumerate(p)]
        over = math.fsum(max(lost * a - b, 0.0) for a, b in zip(after, rest, strict=True))
        return over / max(lost, 1e-6)
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = math.fsum(left)
    ideal = [v / total for v in left] if total > 0 else p
    return math.fsum(max(a - b, 0.0) for a, b in zip(after, ideal, strict=True))


def token_law(
    rule: OracleRule, p: Vector, q: Vector | None, codes: Sequence[int], siblings: int
) -> tuple[list[float], float]:
    """Return the exact law of one token and the price that is reported of it, by enumeration.

    ``siblings`` drafts are drawn from ``q`` without replacement, or are ``codes`` for certain.
    """
    law, quality_loss = [0.0] * len(p), 0.0
    #: Cases that are left: p, q, siblings tried, probability, and what is left of the budget.
    cases = [(list(p), None if q is None else list(q), 0, 1.0, rule.budget)]
    while cases:
        now, drafted, tried, weight, left = cases.pop()
        picks = [(codes[tried], 1.0)] if drafted is None and tried < siblings else []
        if drafted is not None and tried < siblings:
            picks = [(x, chance) for x, chance in enumerate(drafted) if chance > 0]
        if not picks:
            law = [a + weight * b for a, b in zip(law, now, strict=True)]
            continue
        for x, chance in picks:
            verdict = Verdict()
            mass = now[x] + _absorb(rule, now, x, verdict)[1]
            q_x = 1.0 if drafted is None else chance
            share = None if left is None else _share(left, now, drafted)
            if share is not None:
                mass = min(mass, now[x] + share * q_x)
            keeps = min(1.0, mass / q_x)
            cost = _cost(rule, now, drafted, x, mass)
            quality_loss += weight * chance * cost
            law[x] += weight * chance * keeps
            if keeps >= 1:
                continue
            after = _after_rejection(rule, now, drafted, x, verdict, mass)
            quality_loss += (
                weight * chance * (1 - keeps) * _stray(rule, now, drafted, x, mass, after)
            )
            rest = None if share is None else min(1.0, max(share - cost, 0.0) / (1 - keeps))
            fewer = None if drafted is None else _without(drafted, x)
            cases.append((after, fewer, tried + 1, weight * chance * (1 - keeps), rest))
    return law, quality_loss


def sampling(
    rule: OracleRule,
    children: Sequence[Sequence[int]],
    tokens: Sequence[int],
    probs: Sequence[Vector],
    uniforms: Sequence[Sequence[float]],
    q: Sequence[Vector] | None = None,
) -> Verdict:
    """Walk down: try the children of the accepted node in order.

    ``probs[node]`` and ``q[node]``: distributions *after* the node. ``uniforms[depth][slot]``: the
    number that the child in this place of its siblings is tested with.
    """
    verdict = Verdict()
    node, depth = 0, 0
    p = list(probs[0])
    while children[node]:
        drafted = list(q[node]) if q is not None else None
        left = rule.budget
        for slot, child in enumerate(children[node]):
            x, u = tokens[child], uniforms[depth][slot]
            chance = 1.0 if drafted is None else drafted[x]
            if chance <= 0:
                continue
            whole = p[x] + _absorb(rule, p, x, verdict)[1]
            share = None if left is None else _share(left, p, drafted)
            if share is not None:
                whole = min(whole, p[x] + share * chance)
            if whole > 0:
                verdict.compare(u * chance, whole)
            cost = _cost(rule, p, drafted, x, whole)
            verdict.quality_loss += cost
            if u <= whole / chance:
                verdict.path.append(child)
                node = child
                break
            after = _after_rejection(rule, p, drafted, x, verdict, whole)
            verdict.quality_loss += _stray(rule, p, drafted, x, whole, after)
            if share is not None:
                keeps = min(1.0, whole / chance)
                left = min(1.0, max(share - cost, 0.0) / max(1 - keeps, 1e-6))
            p = after
            if drafted is not None:
                drafted = _without(drafted, x)
        else:
            verdict.next = p
            return verdict
        depth += 1
        p = list(probs[node])
        verdict.trust = 1.0
    verdict.next = p
    return verdict


def greedy(
    rule: OracleRule,
    parents: Sequence[int],
    tokens: Sequence[int],
    logits: Sequence[Vector],
    row_rank: Sequence[int],
) -> Verdict:
    """Keep the longest path of drafts that are the argmax of p with ``p[x] := A(x)``."""
    verdict = Verdict()
    best: tuple[int, int] = (0, 0)
    for leaf in range(len(parents)):
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0]])
        accepted = True
        for parent, node in itertools.pairwise(path):
            row = logits[parent]
            top = max(row)
            weights = [math.exp(v - top) for v in row]
            total = math.fsum(weights)
            p = [w / total for w in weights]
            x = tokens[node]
            mass = _absorb(rule, p, x, verdict)[1]
            p[x] += mass
            others = max(p[y] for y in range(len(p)) if y != x)
            # Equal logits are equal probabilities in every precision.
            if mass or row[x] != max(row[y] for y in range(len(p)) if y != x):
                verdict.compare(p[x], others)
            accepted = accepted and p.index(max(p)) == x
        key = (len(path), -row_rank[leaf])
        if accepted and (leaf == 0 or key > best):
            best, verdict.path = key, path
    verdict.next = list(logits[verdict.path[-1]])
    return verdict
