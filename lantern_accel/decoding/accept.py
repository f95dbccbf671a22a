"""Acceptance: which drafted path the target keeps, and the distribution of the token after it.

LANTERN (arXiv 2410.03355) and LANTERN++ (2502.06352) let near neighbours of a drafted code count for
it. All decisions are float32 tensors of fixed shape; nothing is read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.logits import draw
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.strategy.values import Acceptance, Exact, Lantern, Residual


@dataclass(frozen=True)
class Rule:
    """An acceptance rule with its neighbour table, integer ``[V, >= k]``; None when exact."""

    acceptance: Acceptance
    residual: Residual = "aggregate"
    neighbours: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """What one step keeps, for ``B`` images.

    ``path`` integer ``[B, D + 1]``: nodes from the root on, valid up to ``length``; ``length`` integer
    ``[B]``: accepted drafts; ``bonus`` integer ``[B]``: the token after the path (the next root);
    ``weights`` float32 ``[B, V]``: what it was drawn from; ``moved`` float32 ``[B, D]``: the mass that
    the accepted draft at each depth borrowed from its neighbours, c_J.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    weights: Tensor
    moved: Tensor


def _absorbed(rule: Rule, px: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many neighbours count, ``J``, and their mass, ``c_J``.

    ``px [...]`` is p(x), ``near [..., k]`` the mass of its neighbours, nearest first. J is the
    largest j with ``c_j <= B``; B is delta (LANTERN) or ``(lambda - 1) p(x)`` (LANTERN++).
    """
    mass = near.cumsum(dim=-1)
    if isinstance(rule.acceptance, Lantern):
        within = mass <= rule.acceptance.delta
    else:
        assert not isinstance(rule.acceptance, Exact)
        within = mass <= (rule.acceptance.lam - 1.0) * px.unsqueeze(-1)
    count = within.sum(dim=-1, dtype=torch.int32)
    moved = torch.where(within, mass, 0.0).amax(dim=-1)
    return count, moved


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-38), fallback)


def residual(
    rule: Rule,
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    relaxed_mass: Tensor,
    near_codes: Tensor | None,
    near_mass: Tensor | None,
    absorbed: Tensor | None,
) -> Tensor:
    """Return the target distribution after the draft ``x`` was rejected, float32 ``[B, V]``.

    ``p [B, V]`` before the test; ``q [B, V]`` what x was drawn from, earlier siblings removed (None:
    q = 1 at x); ``relaxed_mass [B]`` is A(x); ``near_codes, near_mass [B, k]``; ``absorbed [B]`` is J.
    """
    column = x.unsqueeze(-1)
    drafted = torch.zeros_like(p).scatter(-1, column, 1.0) if q is None else q
    if rule.residual == "official":
        if absorbed is not None and near_codes is not None:
            wide = near_codes[:, : rule.acceptance.k + 1]
            hit = (absorbed > 0).unsqueeze(-1)
            if q is None:
                p = torch.where(hit, p.scatter(-1, wide, 0.0), p)
            else:
                drafted = torch.where(hit, drafted.scatter(-1, wide, 0.0), drafted)
        left = p.scatter(-1, column, 0.0) if q is None else (p - drafted).clamp(min=0.0)
        return _normalised(left, torch.full_like(p, 1.0 / p.shape[-1]))
    if rule.residual == "optimal":
        # f(y) = min(1, A(y) / q(y)). For drawn drafts q f = min(q, A), and since A >= p, what is left
        # of p is max(0, p - q), whatever A is.
        accepted = q if q is not None else drafted * relaxed_mass.unsqueeze(-1).clamp(max=1.0)
        return _normalised((p - accepted).clamp(min=0.0), p)
    target = p
    if absorbed is not None and near_codes is not None and near_mass is not None:
        k = rule.acceptance.k
        order = torch.arange(k, dtype=torch.int32, device=p.device)
        kept = torch.where(order < absorbed.unsqueeze(-1), 0.0, near_mass[:, :k])
        target = p.scatter(-1, near_codes[:, :k], kept)
        target = target.scatter(-1, column, relaxed_mass.unsqueeze(-1))
    return _normalised((target - drafted).clamp(min=0.0), p)


def accept_sampling(
    tree: DraftTree, probs: Tensor, rule: Rule, uniforms: Tensor, bonus_uniform: Tensor
) -> Accepted:
    """Walk down the tree, trying the children of the accepted node in order.

    ``probs`` float32 ``[B, T, V]``: the target's processed distribution at each node. ``uniforms``
    ``[B, sum(max_children)]``: one for each level and sibling slot. A draft x is kept where
    ``u <= A(x) / q(x)``; after a rejection the distribution becomes the residual.
    """
    batch, _, vocab = probs.shape
    node = torch.zeros(batch, dtype=tree.tokens.dtype, device=probs.device)
    alive = torch.ones(batch, dtype=torch.bool, device=probs.device)
    length = torch.zeros_like(node)
    moved: list[Tensor] = []
    path = [node]
    p = probs[:, 0]
    slot = 0

    def at(table: Tensor, index: Tensor) -> Tensor:
        return table.gather(1, index.unsqueeze(1)).squeeze(1)

    def row(table: Tensor, index: Tensor) -> Tensor:
        return table.gather(1, index.view(-1, 1, 1).expand(-1, 1, vocab)).squeeze(1)

    for width in tree.max_children:
        first, count = at(tree.first_child, node), at(tree.num_children, node)
        taken = torch.zeros_like(alive)
        chosen = node
        used = torch.zeros(batch, device=probs.device)
        q = None
        if tree.q is not None and tree.group is not None:
            q = row(tree.q, at(tree.group, node))
        for c in range(width):
            child = torch.where(c < count, first + c, 0)
            x = at(tree.tokens, child)
            px = at(p, x)
            near_codes = near_mass = absorbed = None
            mass, extra = px, torch.zeros_like(px)
            if rule.neighbours is not None and not isinstance(rule.acceptance, Exact):
                near_codes = rule.neighbours.index_select(0, x).to(x.dtype)
                near_mass = p.gather(1, near_codes)
                absorbed, extra = _absorbed(rule, px, near_mass[:, : rule.acceptance.k])
                mass = px + extra
            qx = torch.ones_like(px) if q is None else at(q, x)
            tried = alive & ~taken & (c < count) & (qx > 0)
            kept = tried & (uniforms[:, slot] * qx <= mass)
            slot += 1
            refused = (tried & ~kept).unsqueeze(-1)
            after = residual(rule, p, q, x, mass, near_codes, near_mass, absorbed)
            p = torch.where(refused, after, p)
            if q is not None and c + 1 < width:
                less = q.scatter(-1, x.unsqueeze(-1), 0.0)
                q = torch.where(refused, _normalised(less, less), q)
            chosen = torch.where(kept, child, chosen)
            used = used + torch.where(kept, extra, 0.0)
            taken = taken | kept
        alive = alive & taken
        node = chosen
        path.append(node)
        moved.append(used)
        length = length + alive
        p = torch.where(alive.unsqueeze(-1), row(probs, node), p)
    borrowed = torch.stack(moved, 1) if moved else probs.new_zeros(batch, 0)
    bonus = draw(p, bonus_uniform, node.dtype)
    return Accepted(torch.stack(path, 1), length, bonus, p, borrowed)


def accept_greedy(tree: DraftTree, logits: Tensor, rule: Rule) -> Accepted:
    """Keep the longest path on which every draft x is the argmax of p with ``p[x] := A(x)``.

    ``logits`` float32 ``[B, T, V]``, guided but not filtered. The neighbours keep their own mass; ties
    go to the lower code, and paths of equal length to the lower ``row_rank``. The bonus token is the
    argmax of the unmodified logits at the last accepted node.
    """
    batch, nodes, vocab = logits.shape
    best = logits.argmax(dim=-1).to(tree.tokens.dtype)
    depth = len(tree.max_children)
    parent_best = best.gather(1, tree.parent)
    x = tree.tokens
    keep = x == parent_best
    moved = torch.zeros(batch, nodes, device=logits.device)
    if rule.neighbours is not None and not isinstance(rule.acceptance, Exact):
        flat = logits.softmax(dim=-1).flatten(1)
        base = tree.parent * vocab
        px = flat.gather(1, base + x)
        top = flat.gather(1, base + parent_best)
        near = rule.neighbours[:, : rule.acceptance.k].index_select(0, x.flatten()).to(x.dtype)
        near = near.view(batch, nodes, -1) + base.unsqueeze(-1)
        mass = flat.gather(1, near.flatten(1)).view(near.shape)
        moved = _absorbed(rule, px, mass)[1]
        total = px + moved
        keep = keep | (total > top) | ((total == top) & (x < parent_best))
    root = torch.arange(nodes, dtype=best.dtype, device=logits.device) == 0
    keep = keep | root
    for _ in range(depth):
        keep = keep & keep.gather(1, tree.parent)
    reached = torch.where(keep, tree.depth, -1)
    length = reached.amax(dim=1)
    candidates = reached == length.unsqueeze(1)
    rank = torch.where(candidates, tree.row_rank, nodes)
    last = rank.argmin(dim=1).to(best.dtype)
    seen = tree.visible.gather(1, last.view(-1, 1, 1).expand(-1, 1, nodes)).squeeze(1)
    levels = torch.arange(depth + 1, dtype=best.dtype, device=logits.device).view(1, -1, 1)
    on_path = seen.unsqueeze(1) & (tree.depth.unsqueeze(1) == levels)
    path = on_path.to(torch.int32).argmax(dim=-1).to(best.dtype)
    weights = logits.gather(1, last.view(-1, 1, 1).expand(-1, 1, vocab)).squeeze(1)
    bonus = best.gather(1, last.unsqueeze(1)).squeeze(1)
    # A draft that is the argmax anyway borrows nothing.
    needed = torch.where(x == parent_best, 0.0, moved).gather(1, path)[:, 1:]
    used = torch.where(levels[:, 1:, 0] <= length.unsqueeze(1), needed, 0.0)
    return Accepted(path, length, bonus, weights, used)
