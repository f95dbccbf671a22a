"""Acceptance: which drafted path the target keeps, and the distribution of the token after it.

LANTERN (arXiv 2410.03355) and LANTERN++ (2502.06352) let near neighbours of a drafted code count for
it. All decisions are float32 tensors of fixed shape; nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lantern_accel.decoding.logits import REFERENCE, Filters, distribution
from lantern_accel.decoding.rule import TINY, Rule, allowance
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.device.operations import flags
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.strategy.values import Tried


@dataclass(frozen=True)
class Accepted:
    """What one step keeps, for ``B`` images.

    ``path`` integer ``[B, D + 1]``: nodes from the root on, valid up to ``length``; ``length`` integer
    ``[B]``: accepted drafts; ``bonus`` integer ``[B]``: the token after the path (the next root);
    ``weights`` float32 ``[B, V]``: what it was drawn from; ``price`` float32 ``[B, D]``: what relaxation
    cost the token after each node of the path. Its expectation bounds the total variation between the
    law of that token and the target's; at temperature 0 it is 1 where the token is not the argmax.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    weights: Tensor
    price: Tensor


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=TINY), fallback)


@dataclass(frozen=True)
class DraftTest:
    """Drafts ``x [...]``, each against the target's distribution ``p [..., V]`` of its place.

    ``q [..., V]`` is what x was drawn from, earlier siblings removed; None where it is certain (q = 1).
    ``mass [...]`` is A(x), at most what the budget allows; ``near, near_mass [..., >= k]`` the
    neighbours; ``absorbed [...]`` how many of them count.
    """

    p: Tensor
    q: Tensor | None
    x: Tensor
    px: Tensor
    qx: Tensor
    mass: Tensor
    near: Tensor | None
    near_mass: Tensor
    absorbed: Tensor

    @property
    def keeps(self) -> Tensor:
        """The probability with which the draft is kept, ``min(1, A(x) / q(x))``."""
        return (self.mass / self.qx.clamp(min=TINY)).clamp(max=1.0)

    @property
    def price(self) -> Tensor:
        """What the test adds to the total variation: ``min(1, A / q) - min(1, p / q)``.

        Its mean over drafts is ``sum_x [min(q, A) - min(q, p)]``, the distance of one drawn draft.
        """
        return self.keeps - (self.px / self.qx.clamp(min=TINY)).clamp(max=1.0)


def examine(
    rule: Rule, p: Tensor, q: Tensor | None, x: Tensor, depth: int | Tensor, left: Tensor | None
) -> DraftTest:
    """Look up what testing drafts needs; ``left [...]``: what each may spend (:func:`allowance`)."""
    column = x.unsqueeze(-1)
    px = p.gather(-1, column).squeeze(-1)
    qx = torch.ones_like(px) if q is None else q.gather(-1, column).squeeze(-1)
    near, near_mass = rule.near(p, x)
    if not rule.relaxed:
        return DraftTest(
            p, q, x, px, qx, px, None, near_mass, torch.zeros_like(px, dtype=torch.int32)
        )
    k = rule.acceptance.k
    absorbed, extra = rule.borrowed(Tried(px, qx, near_mass[..., :k], p, x, depth, q))
    mass = px + extra
    if left is not None:
        mass = torch.minimum(mass, px + left * qx)
    return DraftTest(p, q, x, px, qx, mass, near, near_mass, absorbed)


def residual(rule: Rule, test: DraftTest, allowed: Tensor | None = None) -> Tensor:
    """Return the target's distribution after a draft was refused, float32 ``[..., V]``.

    ``allowed`` bool ``[..., V]``: the codes that the token may be; None: any.
    """
    p, q = test.p, test.q
    column = test.x.unsqueeze(-1)
    drafted = torch.zeros_like(p).scatter(-1, column, 1.0) if q is None else q
    if rule.residual == "official":
        if test.near is not None:
            wide = test.near[..., : rule.acceptance.k + 1]
            hit = (test.absorbed > 0).unsqueeze(-1)
            if q is None:
                p = torch.where(hit, p.scatter(-1, wide, 0.0), p)
            else:
                drafted = torch.where(hit, drafted.scatter(-1, wide, 0.0), drafted)
        left = p.scatter(-1, column, 0.0) if q is None else (p - drafted).clamp(min=0.0)
        # The official code falls back to all codes alike: here, to all that may stand in this place.
        even = torch.ones_like(p) if allowed is None else allowed.float()
        return _normalised(left, even / even.sum(dim=-1, keepdim=True))
    if rule.residual == "optimal":
        # f(y) = min(1, A(y) / q(y)). For drawn drafts q f = min(q, A), and since A >= p, what is left
        # of p is max(0, p - q), whatever A is.
        accepted = q if q is not None else drafted * test.mass.unsqueeze(-1).clamp(max=1.0)
        return _normalised((p - accepted).clamp(min=0.0), p)
    target = p
    if rule.relaxed:
        if test.near is not None:
            k = rule.acceptance.k
            order = torch.arange(k, dtype=torch.int32, device=p.device)
            kept = torch.where(order < test.absorbed.unsqueeze(-1), 0.0, test.near_mass[..., :k])
            target = p.scatter(-1, test.near[..., :k], kept)
        target = target.scatter(-1, column, test.mass.unsqueeze(-1))
    return _normalised((target - drafted).clamp(min=0.0), p)


def residual_price(rule: Rule, test: DraftTest, after: Tensor) -> Tensor:
    """Return what a residual that is not the ideal one adds to the price of a refusal, ``[...]``.

    The ideal residual is ``norm(max(0, p - q f))``, under which nothing but the tests moves mass; of the
    residuals that are offered, only LANTERN's official one strays from it in a way that costs.
    """
    if test.q is not None:
        ideal = _normalised((test.p - test.q).clamp(min=0.0), test.p)
        return (after - ideal).clamp(min=0.0).sum(dim=-1)
    refused = (1.0 - test.keeps).unsqueeze(-1)
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
    done = filters.ops.accept(tree, logits, filters.given, rule, uniforms, bonus_uniform, masked)
    if done is not None:
        return Accepted(*done)
    ops = filters.ops
    inner, last = _rows(logits, tree.parents), partial(_row, logits)
    allowed = None
    if masked and rule.residual == "official":
        allowed = inner > float("-inf")
    probs = distribution(inner, filters) if tree.max_children else inner
    return _walk(
        tree,
        probs,
        lambda node: distribution(last(node), filters),
        rule,
        uniforms,
        bonus_uniform,
        allowed,
        ops,
    )


def accept_sampling(
    tree: DraftTree,
    probs: Tensor,
    rule: Rule,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    allowed: Tensor | None = None,
    ops: SamplingOps = REFERENCE,
) -> Accepted:
    """Walk down the tree, trying the children of the accepted node in order.

    ``probs`` float32 ``[B, T, V]``: the target's processed distribution at each node. ``uniforms``
    ``[B, sum(max_children)]``: one for each level and sibling slot. A draft x is kept where
    ``u <= A(x) / q(x)``; after a refusal the distribution becomes the residual. ``allowed`` bool
    ``[B, T, V]``: the codes that may follow each node, read by the official residual; None: any.
    ``ops`` draws the bonus token.
    """
    inner = _rows(probs, tree.parents)
    may = None if allowed is None else _rows(allowed, tree.parents)
    return _walk(tree, inner, partial(_row, probs), rule, uniforms, bonus_uniform, may, ops)


def _rows(table: Tensor, nodes: Tensor | None) -> Tensor:
    """Return rows ``nodes [B, G]`` of ``table [B, T, V]``; all of them for None."""
    if nodes is None:
        return table
    return table.gather(1, nodes.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def _row(table: Tensor, node: Tensor) -> Tensor:
    """Return row ``node [B]`` of ``table [B, T, V]``: ``[B, V]``."""
    return _rows(table, node.unsqueeze(1)).squeeze(1)


def _at(table: Tensor, node: Tensor) -> Tensor:
    """Return entry ``node [B]`` of ``table [B, T]``."""
    return table.gather(1, node.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Families:
    """What became of every family of siblings, as if its parent had been reached.

    ``chosen`` integer ``[B, G]``: the child that is kept, the parent where none is; ``price``
    ``[B, G]``; ``left`` float32 ``[B, G, V]``: the target's distribution after what was refused.
    """

    chosen: Tensor
    price: Tensor
    left: Tensor


def _test_families(
    tree: DraftTree, p: Tensor, rule: Rule, uniforms: Tensor, allowed: Tensor | None
) -> Families:
    """Test the children of all inner nodes, one sibling rank after the other; ``p [B, G, V]``."""
    tokens = tree.tokens
    parent, slots = tree.parents, tree.tests()
    if parent is None:
        parent = torch.arange(tokens.shape[1], dtype=tokens.dtype, device=p.device)
        parent = parent.expand_as(tokens)
        first, count, depth = tree.first_child, tree.num_children, tree.depth
        q = None if tree.q is None or tree.group is None else _rows(tree.q, tree.group)
    else:
        first, count, depth, slots = (
            t.gather(1, parent) for t in (tree.first_child, tree.num_children, tree.depth, slots)
        )
        q = tree.q
    price = torch.zeros(first.shape, device=p.device)
    taken = flags(False, *first.shape, device=p.device)
    left = None if rule.budget is None else rule.budget.expand_as(price)
    chosen, widest = parent, max(tree.max_children)
    for c in range(widest):
        has = count > c
        child = torch.where(has, first + c, 0)
        x = tokens.gather(1, child)
        u = uniforms.gather(1, torch.where(has, slots + c, 0))
        most = None if left is None else allowance(left, p, q)
        test = examine(rule, p, q, x, depth, most)
        tried = has & ~taken & (test.qx > 0)
        kept = tried & (u * test.qx <= test.mass)
        refused = tried & ~kept
        after = residual(rule, test, allowed)
        if rule.relaxed:
            spent = test.price
            cost = spent
            if rule.residual == "official":
                cost = spent + torch.where(refused, residual_price(rule, test, after), 0.0)
            price = price + torch.where(tried, cost, 0.0)
            if left is not None and most is not None:
                # The next sibling is tried with probability 1 - f, so it may cost that much more.
                rest = (most - spent).clamp(min=0.0) / (1.0 - test.keeps).clamp(min=1e-6)
                left = torch.where(refused, rest.clamp(max=1.0), left)
        p = torch.where(refused.unsqueeze(-1), after, p)
        if q is not None and c + 1 < widest:
            less = q.scatter(-1, x.unsqueeze(-1), 0.0)
            q = torch.where(refused.unsqueeze(-1), _normalised(less, less), q)
        chosen = torch.where(kept, child, chosen)
        taken = taken | kept
    return Families(chosen, price, p)


def _walk(
    tree: DraftTree,
    inner: Tensor,
    last: Callable[[Tensor], Tensor],
    rule: Rule,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    allowed: Tensor | None,
    ops: SamplingOps,
) -> Accepted:
    """Test every family at once, then follow the children that are kept.

    Whether a child is kept depends on its parent's distribution and siblings alone, not on how the
    parent was reached. ``inner`` float32 ``[B, G, V]``: distributions of the nodes ``tree.parents``;
    ``last(node)`` returns those of nodes ``[B]``; ``allowed`` as ``inner``.
    """
    depth = len(tree.max_children)
    node = torch.zeros_like(tree.tokens[:, 0])
    if not depth:
        p = last(node)
        bonus = ops.draw(p, bonus_uniform)
        return Accepted(node.unsqueeze(1), node, bonus, p, p[:, :0])
    found = _test_families(tree, inner, rule, uniforms, allowed)
    chosen, price = found.chosen, found.price
    if tree.parents is not None:
        # From groups to nodes; what is read for a node without children is not used.
        assert tree.group is not None
        ids = torch.arange(tree.tokens.shape[1], dtype=chosen.dtype, device=chosen.device)
        has = tree.num_children > 0
        chosen = torch.where(has, chosen.gather(1, tree.group), ids)
        price = torch.where(has, price.gather(1, tree.group), 0.0)
    path = [node]
    for _ in range(depth):
        node = _at(chosen, node)
        path.append(node)
    steps = torch.stack(path, dim=1)
    length = _at(tree.depth, node)
    order = torch.arange(depth, dtype=length.dtype, device=length.device)
    paid = torch.where(order <= length.unsqueeze(1), price.gather(1, steps[:, :-1]), 0.0)
    if tree.parents is None:
        p = _row(found.left, node)
    else:
        assert tree.group is not None
        p = torch.where(
            (_at(tree.num_children, node) > 0).unsqueeze(-1),
            _row(found.left, _at(tree.group, node)),
            last(node),
        )
    return Accepted(steps, length, ops.draw(p, bonus_uniform), p, paid)
