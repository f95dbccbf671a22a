"""Acceptance: which drafted path the target keeps, and the distribution of the token after it.

A draft is tested by a uniform (:mod:`~.rule`), or compared with the token that noise chooses: each code
of each position has noise of its own, an exponential ``E`` of the seed, the image, the position and the
code alone, and the token is ``argmax_i p_i / E_i``, which is a draw from p. Plain decoding draws so, so
that the image is the same, whatever was drafted. A draft that the same noise chose from q is that token
with probability at least ``(1 - d) / (1 + d)``, d the total variation of p and q (Daliri, Musco, Suresh,
arXiv 2408.07978; SCD-GS, 2510.24211, for windows). Nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lantern_accel.decoding.draft_test import (
    allowance,
    examine,
    lift,
    normalise,
    residual,
    residual_loss,
    weight_of,
)
from lantern_accel.decoding.logits import Filters, TokenChooser, distribution
from lantern_accel.decoding.rows import REFERENCE
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.trees import Accepted, DraftTree


def accept(
    tree: DraftTree,
    logits: Tensor,
    filters: Filters,
    rule: Rule,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    *,
    masked: bool = False,
) -> Accepted:
    """Make distributions of guided logits ``[B, T, V]`` and walk down the tree; not for greedy decoding.

    ``masked``: logits of -inf are codes that may not follow. The device does all of it at once where it
    has a kernel, else :func:`accept_sampling` what follows the distributions.
    """
    done = filters.ops.accept(
        tree, logits, filters.given, rule.given, uniforms, bonus_uniform, masked
    )
    if done is not None:
        return Accepted(*done)
    probs, allowed = distribution(logits, filters), None
    if masked and rule.residual == "official":
        allowed = (logits > float("-inf")).float()
    return accept_sampling(tree, probs, rule, uniforms, bonus_uniform, allowed, filters.sample)


def accept_sampling(
    tree: DraftTree,
    probs: Tensor,
    rule: Rule,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    allowed: Tensor | None = None,
    draw: Callable[[Tensor, Tensor], Tensor] = REFERENCE.sample,
) -> Accepted:
    """Test every family of siblings in order, then follow the children that are kept.

    ``probs`` float32 ``[B, T, V]``: the target's processed distribution at each node. ``uniforms [B,
    sum(max_children)]``: one for each level and sibling slot. A draft x is kept where ``u <= A(x) /
    q(x)``; after a rejection the distribution becomes the residual. That depends on its
    parent's distribution and siblings alone, not on how the parent was reached. ``allowed``
    ``[B, T, V]``: 1 of codes that may follow, which the official residual reads; None: any. ``draw``: a
    device's draws.
    """
    depth, root = len(tree.max_children), torch.zeros_like(tree.tokens[:, 0])
    if not depth:
        p = row_at(probs, root)
        return Accepted(root.unsqueeze(1), root, draw(p, bonus_uniform), p, p[:, :0])
    inner = _rows(probs, tree.inner)
    allowed = None if allowed is None else _rows(allowed, tree.inner)
    chosen, quality_loss, left = _test_families(tree, inner, rule, uniforms, allowed)
    path = [root, chosen[:, 0]]
    while len(path) <= depth:
        path.append(entry_at(chosen, path[-1]))
    node, steps = path[-1], torch.stack(path, dim=1)
    length = entry_at(tree.depth, node)
    levels = torch.arange(depth, dtype=length.dtype, device=length.device)
    paid = quality_loss.gather(1, steps[:, :-1]).masked_fill(levels > length.unsqueeze(1), 0)
    if tree.group is None or tree.inner is None:
        p = row_at(left, node)
    else:
        leaf = entry_at(tree.num_children, node).unsqueeze(-1) == 0
        p = torch.where(leaf, row_at(probs, node), row_at(left, entry_at(tree.group, node)))
    return Accepted(steps, length, draw(p, bonus_uniform), p, paid)


def _rows(table: Tensor, nodes: Tensor | None) -> Tensor:
    """Return rows ``nodes [B, G]`` of ``table [B, T, V]``; all of them for None."""
    if nodes is None:
        return table
    return table.gather(1, nodes.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def row_at(table: Tensor, node: Tensor) -> Tensor:
    """Return row ``node [B]`` of ``table [B, T, V]``: ``[B, V]``."""
    return _rows(table, node.unsqueeze(1)).squeeze(1)


def entry_at(table: Tensor, node: Tensor) -> Tensor:
    """Return entry ``node [B]`` of ``table [B, T]``."""
    return table.gather(1, node.unsqueeze(1)).squeeze(1)


def _gather_proposals(q: Tensor, x: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return what each sibling was sampled from, ``[B, G, V]``, and its probability, ``[B, W, G]``."""
    rows = [q]
    for code in x[:-1]:
        less = rows[-1].scatter(-1, code.unsqueeze(-1), 0.0)
        rows.append(normalise(less, less))
    return rows, torch.stack(
        [weight_of(row, code) for row, code in zip(rows, x, strict=True)], dim=1
    )


def _test_families(
    tree: DraftTree, p: Tensor, rule: Rule, uniforms: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Test the children of all inner nodes, one sibling rank after the other; ``p [B, G, V]``.

    Returns, as if every node had been reached, the child that is kept, integer ``[B, T]`` (the node
    itself where none is), the quality loss ``[B, T]``, and the target's distribution after the rejected
    drafts, ``[B, G, V]``. What does not depend on the tests is looked up for all ranks at once.
    """
    q, inner = tree.q, tree.inner
    if inner is None and q is not None and tree.group is not None:
        q = _rows(q, tree.group)
    first, count, depth, tests = tree.first_child, tree.num_children, tree.depth, tree.first_tests
    order = torch.arange(first.shape[1], dtype=first.dtype, device=first.device)
    nodes = parent = order.expand_as(first)
    if inner is not None:
        parent = inner
        first, count, depth, tests = (t.gather(1, inner) for t in (first, count, depth, tests))
    rank = order[: max(tree.max_children)].unsqueeze(1)
    none = count.unsqueeze(1) <= rank
    child, test = ((t.unsqueeze(1) + rank).masked_fill(none, 0) for t in (first, tests))
    x = tree.tokens.gather(1, child.flatten(1)).view(child.shape)
    bar = uniforms.gather(1, test.flatten(1)).view(child.shape)
    live, ranks = none.logical_not(), child.shape[1]
    rows: Sequence[Tensor | None] = [None] * ranks
    shares = torch.ones(child.shape, device=p.device)
    if q is not None:
        rows, shares = _gather_proposals(q, list(x.unbind(1)))
        live, bar = live & (shares > 0), bar * shares
    codes = rule.codes(x)
    left = None if rule.budget is None else rule.budget.expand(parent.shape)
    chosen, free = parent, parent >= 0  # all: a compiler may have no kernel that fills booleans
    quality_loss = torch.zeros(parent.shape, device=p.device)
    tried: list[tuple[Tensor, Tensor]] = []
    for c in range(ranks):
        open_ = live[:, c] & free
        most = None if left is None else allowance(left, p, rows[c])
        found = examine(rule, p, rows[c], x[:, c], depth, most, codes[:, c], shares[:, c])
        kept = open_ & (bar[:, c] <= found.mass)
        refused = open_ ^ kept
        after = residual(rule, found, allowed)
        if rule.relaxed:
            tried.append((found.px, torch.where(open_, found.mass, found.px)))
            if rule.residual == "official":
                quality_loss = quality_loss + residual_loss(rule, found, after) * refused
            if left is not None and most is not None:
                # The next sibling is tried with probability 1 - f, so it may cost that much more.
                rest = (most - found.quality_loss).clamp(min=0.0) / (1.0 - found.probability).clamp(
                    min=1e-6
                )
                left = torch.where(refused, rest.clamp(max=1.0), left)
        p = torch.where(refused.unsqueeze(-1), after, p)
        chosen = torch.where(kept, child[:, c], chosen)
        free = free ^ kept
    if tried:
        px, mass = (torch.stack(each, dim=1) for each in zip(*tried, strict=True))
        quality_loss = quality_loss + lift(px, mass, shares).sum(dim=1)
    if inner is not None:  # from groups to nodes
        chosen = nodes.scatter(1, inner, chosen)
        quality_loss = torch.zeros(nodes.shape, device=p.device).scatter(1, inner, quality_loss)
    return chosen, quality_loss, p


def deepest(tree: DraftTree, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest path of nodes whose drafts are ``kept``, bool ``[B, T]``, and its length.

    Integer ``[B, D + 1]`` and ``[B]``, as in :class:`Accepted`; of equal lengths the lower ``row_rank``.
    """
    nodes, depth, index = kept.shape[1], len(tree.max_children), tree.depth.dtype
    order = torch.arange(nodes, dtype=index, device=kept.device)
    accepted = (kept | (order == 0)).to(index)  # not every device gathers booleans
    for _ in range(depth):
        accepted = accepted * accepted.gather(1, tree.parent)
    reached = (tree.depth + 1) * accepted - 1
    length = reached.amax(dim=1)
    rank = torch.where(reached == length.unsqueeze(1), tree.row_rank, nodes)
    seen = row_at(tree.visible, rank.argmin(dim=1).to(index))
    levels = torch.arange(depth + 1, dtype=index, device=kept.device).view(1, -1, 1)
    on_path = torch.where(tree.depth.unsqueeze(1) == levels, seen.unsqueeze(1), 0)
    return on_path.argmax(dim=-1).to(index), length


def accept_invariant(
    tree: DraftTree, logits: Tensor, choices: TokenChooser, length: Tensor
) -> Accepted:
    """Keep the drafts that the target chooses itself, from guided logits ``[B, T, V]``.

    Walks down the children that are the token chosen after their parent, by noise or greedily the
    likeliest. ``length [B]``: the position of the root.
    """
    filters = choices.filters
    if choices.greedy:
        weights, chosen = logits, logits.argmax(dim=-1).to(filters.ops.index)
    else:
        done = filters.ops.accept_invariant(tree, logits, filters.given, choices.keys, length)
        if done is not None:
            return Accepted(*done)
        weights = distribution(logits, filters)
        chosen = choices.of(weights, length.unsqueeze(1) + (tree.depth + 1))
    if not tree.max_children:
        node = torch.zeros_like(chosen[:, 0])
        return Accepted(node.unsqueeze(1), node, chosen[:, 0], weights[:, 0], weights[:, 0, :0])
    path, kept = deepest(tree, tree.tokens == chosen.gather(1, tree.parent))
    last = entry_at(path, kept)
    quality_loss = torch.zeros(len(path), path.shape[1] - 1, device=path.device)
    return Accepted(path, kept, entry_at(chosen, last), row_at(weights, last), quality_loss)


def accept_greedy(tree: DraftTree, logits: Tensor, rule: Rule) -> Accepted:
    """Keep the longest path on which every draft x is the argmax of p with ``p[x] := A(x)``.

    ``logits`` float32 ``[B, T, V]``, guided but not filtered. The neighbours keep their own mass; ties
    go to the lower code, and paths of equal length to the lower ``row_rank``. The bonus token is the
    argmax of the unmodified logits at the last accepted node.
    """
    best = logits.argmax(dim=-1).to(tree.tokens.dtype)
    parent_best, x = best.gather(1, tree.parent), tree.tokens
    likeliest = x == parent_best
    # The parents' rows, by one index: gathering as many numbers takes many times as long.
    image = torch.arange(len(x), dtype=x.dtype, device=x.device).unsqueeze(1)
    rows = (image * logits.shape[1] + tree.parent).flatten()
    p = logits.softmax(dim=-1).flatten(0, 1).index_select(0, rows).view(logits.shape)
    mass = examine(rule, p, None, x, (tree.depth - 1).clamp(min=0), None).mass
    top = weight_of(p, parent_best)
    path, length = deepest(tree, likeliest | (mass > top) | ((mass == top) & (x < parent_best)))
    last = entry_at(path, length)
    levels = torch.arange(1, path.shape[1], dtype=path.dtype, device=path.device)
    other = ((x - parent_best).gather(1, path)[:, 1:] != 0) & (levels <= length.unsqueeze(1))
    return Accepted(path, length, entry_at(best, last), row_at(logits, last), other.float())
