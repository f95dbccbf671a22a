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


@dataclass
class Verdict:
    """What one image keeps.

    ``trust`` says how far float32 can be believed: 1 at first, times the mass that each residual
    left; ``closest`` is the smallest distance of a decision to its threshold, scaled by the trust.
    """

    path: list[int] = field(default_factory=lambda: [0])
    next: list[float] = field(default_factory=list)
    moved: float = 0.0
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
    rule: OracleRule, p: list[float], q: Vector | None, x: int, verdict: Verdict
) -> list[float]:
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
            taken = [min(1.0, p[x] + mass) if y == x else 0.0 for y in range(size)]
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
        for slot, child in enumerate(children[node]):
            x, u = tokens[child], uniforms[depth][slot]
            chance = 1.0 if drafted is None else drafted[x]
            if chance <= 0:
                continue
            mass = _absorb(rule, p, x, verdict)[1]
            if p[x] + mass > 0:
                verdict.compare(u * chance, p[x] + mass)
            if u <= (p[x] + mass) / chance:
                verdict.moved += mass
                verdict.path.append(child)
                node = child
                break
            p = _after_rejection(rule, p, drafted, x, verdict)
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
