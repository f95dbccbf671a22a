"""Acceptance: which drafted path the target keeps, and the distribution of the token after it.

LANTERN (arXiv 2410.03355) and LANTERN++ (2502.06352) let near neighbours of a drafted code count for
it. All decisions are float32 tensors of fixed shape; nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.logits import Filters, distribution
from lantern_accel.decoding.rows import REFERENCE
from lantern_accel.decoding.rule import TINY, Rule, allowance
from lantern_accel.decoding.trees import Accepted, DraftTree
from lantern_accel.strategy.rules import Tried


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
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
    def price(self) -> Tensor:
        """What the test adds to the total variation (:func:`_lift`)."""
        return _lift(self.px, self.mass, self.qx)


def _lift(px: Tensor, mass: Tensor, qx: Tensor) -> Tensor:
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
        qx = torch.ones(x.shape, device=p.device) if q is None else _of(q, x)
    found = p.gather(-1, codes)
    px, near_mass = found[..., 0], found[..., 1:]
    if not rule.relaxed:
        return DraftTest(p, q, x, px, qx, px, None, near_mass, None)
    near = codes[..., 1:] if codes.shape[-1] > 1 else None
    k = rule.acceptance.k
    absorbed, extra = rule.borrowed(Tried(px, qx, near_mass[..., :k], p, x, depth, q))
    mass = px + extra
    if left is not None:
        mass = torch.minimum(mass, px + left * qx)
    return DraftTest(p, q, x, px, qx, mass, near, near_mass, absorbed)


def _of(rows: Tensor, x: Tensor) -> Tensor:
    """Return what ``rows [..., V]`` hold of codes ``x [...]``."""
    return rows.gather(-1, x.unsqueeze(-1)).squeeze(-1)


def residual(rule: Rule, test: DraftTest, allowed: Tensor | None = None) -> Tensor:
    """Return the target's distribution after a draft was rejected, float32 ``[..., V]``.

    ``allowed`` bool ``[..., V]``: the codes that the token may be; None: any.
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
        return _normalised(rest, even / even.sum(dim=-1, keepdim=True))
    target = p
    if rule.residual == "aggregate" and near is not None and absorbed is not None:
        k = rule.acceptance.k
        kept = test.near_mass[..., :k].masked_fill(rule.absorbs(absorbed), 0)
        target = p.scatter(-1, near[..., :k], kept)
    if q is None:
        # A draft that is certain takes all that x counts for.
        return _normalised(target.scatter(-1, column, 0.0), p)
    if rule.residual == "optimal":
        # f(y) = min(1, A(y) / q(y)). For sampled drafts q f = min(q, A), and since A >= p, what is left
        # of p is max(0, p - q), whatever A is.
        return _normalised((p - q).clamp(min=0.0), p)
    if rule.relaxed:
        target = target.scatter(-1, column, test.mass.unsqueeze(-1))
    return _normalised((target - q).clamp(min=0.0), p)


def residual_price(rule: Rule, test: DraftTest, after: Tensor) -> Tensor:
    """Return what a less than ideal residual adds to the quality loss of a rejection, ``[...]``."""
    if test.q is not None:
        ideal = _normalised((test.p - test.q).clamp(min=0.0), test.p)
        return (after - ideal).clamp(min=0.0).sum(dim=-1)
    refused = (1.0 - test.probability).unsqueeze(-1)
    rest = test.p.scatter(-1, test.x.unsqueeze(-1), 0.0)
    over = (refused * after - rest).clamp(min=0.0).sum(dim=-1)
    return over / refused.squeeze(-1).clamp(min=1e-6)


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
    return accept_sampling(tree, logits, rule, uniforms, bonus_uniform, filters, masked)


def accept_sampling(
    tree: DraftTree,
    probs: Tensor,
    rule: Rule,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    filters: Filters | None = None,
    masked: bool = False,
) -> Accepted:
    """Test every family of siblings in order, then follow the children that are kept.

    ``probs`` float32 ``[B, T, V]``: the target's processed distribution at each node; with ``filters``
    guided logits, of which the rows that are visited become distributions. ``uniforms [B,
    sum(max_children)]``: one for each level and sibling slot. A draft x is kept where ``u <= A(x) /
    q(x)``; after a rejection the distribution becomes the residual. That depends on its
    parent's distribution and siblings alone, not on how the parent was reached. ``masked``: logits of
    -inf are codes that may not follow, as the official residual has to know.
    """
    draw = REFERENCE.draw if filters is None else filters.draw
    guided = probs
    if filters is not None and filters.ops.preferences.filters_trees:
        probs, filters = distribution(probs, filters), None

    def last(node: Tensor) -> Tensor:
        row = row_at(probs, node)
        return row if filters is None else distribution(row, filters)

    depth, root = len(tree.max_children), torch.zeros_like(tree.tokens[:, 0])
    if not depth:
        p = last(root)
        return Accepted(root.unsqueeze(1), root, draw(p, bonus_uniform), p, p[:, :0])
    inner, allowed = _rows(probs, tree.parents), None
    if masked and rule.residual == "official":
        allowed = _rows(guided, tree.parents) > float("-inf")
    if filters is not None:
        inner = distribution(inner, filters)
    chosen, price, left = _test_families(tree, inner, rule, uniforms, allowed)
    path = [root, chosen[:, 0]]
    while len(path) <= depth:
        path.append(entry_at(chosen, path[-1]))
    node, steps = path[-1], torch.stack(path, dim=1)
    length = entry_at(tree.depth, node)
    levels = torch.arange(depth, dtype=length.dtype, device=length.device)
    paid = price.gather(1, steps[:, :-1]).masked_fill(levels > length.unsqueeze(1), 0)
    if tree.group is None or tree.parents is None:
        p = row_at(left, node)
    else:
        leaf = entry_at(tree.num_children, node).unsqueeze(-1) == 0
        p = torch.where(leaf, last(node), row_at(left, entry_at(tree.group, node)))
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


def _drafted(q: Tensor, x: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return what each sibling was sampled from, ``[B, G, V]``, and its probability, ``[B, W, G]``."""
    rows = [q]
    for code in x[:-1]:
        less = rows[-1].scatter(-1, code.unsqueeze(-1), 0.0)
        rows.append(_normalised(less, less))
    return rows, torch.stack([_of(row, code) for row, code in zip(rows, x, strict=True)], dim=1)


def _test_families(
    tree: DraftTree, p: Tensor, rule: Rule, uniforms: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Test the children of all inner nodes, one sibling rank after the other; ``p [B, G, V]``.

    Returns, as if every node had been reached, the child that is kept, integer ``[B, T]`` (the node
    itself where none is), the quality loss ``[B, T]``, and the target's distribution after the rejected
    drafts, ``[B, G, V]``. What does not depend on the tests is looked up for all ranks at once.
    """
    q, inner = tree.q, tree.parents
    if inner is None and q is not None and tree.group is not None:
        q = _rows(q, tree.group)
    first, count, depth, tests = tree.first_child, tree.num_children, tree.depth, tree.tests()
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
        rows, shares = _drafted(q, list(x.unbind(1)))
        live, bar = live & (shares > 0), bar * shares
    codes = rule.codes(x)
    left = None if rule.budget is None else rule.budget.expand(parent.shape)
    chosen, free = parent, torch.ones_like(live[:, 0])
    price = torch.zeros(parent.shape, device=p.device)
    tried: list[tuple[Tensor, Tensor, Tensor]] = []
    for c in range(ranks):
        open_ = live[:, c] & free
        most = None if left is None else allowance(left, p, rows[c])
        found = examine(rule, p, rows[c], x[:, c], depth, most, codes[:, c], shares[:, c])
        kept = open_ & (bar[:, c] <= found.mass)
        refused = open_ ^ kept
        after = residual(rule, found, allowed)
        if rule.relaxed:
            tried.append((found.px, found.mass, open_))
            if rule.residual == "official":
                price = price + residual_price(rule, found, after) * refused
            if left is not None and most is not None:
                # The next sibling is tried with probability 1 - f, so it may cost that much more.
                rest = (most - found.price).clamp(min=0.0) / (1.0 - found.probability).clamp(
                    min=1e-6
                )
                left = torch.where(refused, rest.clamp(max=1.0), left)
        p = torch.where(refused.unsqueeze(-1), after, p)
        chosen = torch.where(kept, child[:, c], chosen)
        free = free ^ kept
    if tried:
        px, mass, open_ = (torch.stack(each, dim=1) for each in zip(*tried, strict=True))
        price = price + (_lift(px, mass, shares) * open_).sum(dim=1)
    if inner is not None:  # from groups to nodes
        chosen = nodes.scatter(1, inner, chosen)
        price = torch.zeros(nodes.shape, device=p.device).scatter(1, inner, price)
    return chosen, price, p


def deepest(tree: DraftTree, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest path of nodes whose drafts are ``kept``, bool ``[B, T]``, and its length.

    Integer ``[B, D + 1]`` and ``[B]``, as in :class:`Accepted`; of equal lengths the lower ``row_rank``.
    """
    nodes, depth, index = kept.shape[1], len(tree.max_children), tree.depth.dtype
    order = torch.arange(nodes, dtype=index, device=kept.device)
    accepted = kept | (order == 0)
    for _ in range(depth):
        accepted = accepted & accepted.gather(1, tree.parent)
    reached = torch.where(accepted, tree.depth, -1)
    length = reached.amax(dim=1)
    rank = torch.where(reached == length.unsqueeze(1), tree.row_rank, nodes)
    seen = row_at(tree.visible, rank.argmin(dim=1).to(index))
    levels = torch.arange(depth + 1, dtype=index, device=kept.device).view(1, -1, 1)
    on_path = seen.unsqueeze(1) & (tree.depth.unsqueeze(1) == levels)
    return on_path.to(torch.int32).argmax(dim=-1).to(index), length


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
    top = _of(p, parent_best)
    path, length = deepest(tree, likeliest | (mass > top) | ((mass == top) & (x < parent_best)))
    last = entry_at(path, length)
    levels = torch.arange(1, path.shape[1], dtype=path.dtype, device=path.device)
    other = ~likeliest.gather(1, path)[:, 1:] & (levels <= length.unsqueeze(1))
    return Accepted(path, length, entry_at(best, last), row_at(logits, last), other.float())
