"""Computes the exact quality loss of tokens: the distance of their distribution to the target's.

A step's own accounting adds up what each tried draft may move, which no later sibling is seen to undo:
a bound, cheap enough for every step. Here the distribution is summed, in float64 on the host. With

    law_m(p, q)[y] = min(q, A)[y] + sum over x of (q - min(q, A))[x] law_(m-1)(p', q')[y],

m drafts to go and p', q' as a rejection of x leaves them, what is kept is summed over all codes, and so
is the last rejection. Rejections before it are summed over the likeliest codes; one more code, sampled
from the others, stands for the rest. The positive part of ``law - p`` is convex, so that sampling can
only raise its mean: the quality loss is never below the distance, and equals it where all are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.decoding.draft_test import allowance, examine, residual
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.step import Step
from lantern_accel.decoding.trees import Accepted, DraftTree
from lantern_accel.strategy.rules import Tried

#: Numbers in the largest table of one token; what is left sums rejections over this many codes at least.
AT_ONCE = 1 << 18
FEWEST = 8
#: Smaller probabilities are rounding.
NOTHING = 1e-12
#: Uniforms of the codes that stand for the rest lie this far apart, on a circle.
GOLDEN = 0.6180339887498949


def host_rule(rule: Rule) -> Rule:
    """Return a rule whose tensors are on the host, its values float64."""

    def here(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.cpu().double()

    near = None if rule.neighbours is None else rule.neighbours.cpu().long()
    return replace(
        rule, neighbours=near, runtime_params=here(rule.runtime_params), budget=here(rule.budget)
    )


@dataclass(frozen=True)
class _Node:
    """Where a token is decided: its rule on the codes that matter, the level, and what may stand here."""

    rule: Rule
    depth: int
    allowed: Tensor | None
    limit: int | None

    @property
    def near(self) -> Tensor | None:
        rule = self.rule
        return None if rule.neighbours is None or not rule.acceptance.k else rule.neighbours

    def branches(self, rows: int, codes: int) -> int:
        """Return over how many codes a rejection is summed, in each of ``rows``; 0: of later drafts."""
        least = FEWEST if rows == 1 else 0
        reads = max(self.rule.acceptance.k, 1)
        return self.limit or max(least, AT_ONCE // (rows * codes * reads))


def _certain_law(node: _Node, p: Tensor, codes: Tensor) -> Tensor:
    """Return the distribution ``[V]`` of a token whose drafts ``codes [m]`` are certain."""
    law, weight, now = torch.zeros_like(p), p.new_ones(1), p.unsqueeze(0)
    left = None if node.rule.budget is None else node.rule.budget.expand(1)
    for x in codes.unsqueeze(1):
        test = examine(node.rule, now, None, x, node.depth, left)
        law[x] += weight * test.probability
        now = residual(node.rule, test, node.allowed)
        left = _rest(left, test.quality_loss, test.probability)
        weight = weight * (1 - test.probability)
    return law + weight * now[0]


def _rest(left: Tensor | None, spent: Tensor, probability: Tensor) -> Tensor | None:
    """Return what a rejection leaves of the budget, as the step does."""
    if left is None:
        return None
    rest = (left - spent).clamp(min=0.0) / (1 - probability).clamp(min=1e-6)
    return rest.clamp(max=1.0)


def _keep_mass(node: _Node, p: Tensor, q: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``min(q, A)`` of every code and how many neighbours each absorbs, ``[n, V]`` both."""
    n, vocab = p.shape
    if left is not None:
        left = allowance(left, p, q)
    x = torch.arange(vocab)
    near = p[:, :0].unsqueeze(-1)
    if node.near is not None:
        table = node.near[:, : node.rule.acceptance.k]
        near = p.index_select(1, table.flatten()).view(n, vocab, -1)
    rows = p.unsqueeze(1).expand(n, vocab, vocab)
    drawn = q.unsqueeze(1).expand(n, vocab, vocab)
    tried = Tried(p, q, near, rows, x.expand(n, vocab), node.depth, drawn)
    absorbed, extra = node.rule.count_neighbours(tried)
    if left is not None:
        extra = torch.minimum(extra, left.unsqueeze(1) * q)
    return torch.minimum(q, p + extra), absorbed


def _last_refusals(node: _Node, p: Tensor, q: Tensor, refused: Tensor, absorbed: Tensor) -> Tensor:
    """Return the sum over x of ``refused [n, V]`` times the residual after x, ``[n, V]``."""
    over = (p - q).clamp(min=0.0)
    total = over.sum(-1, keepdim=True)
    rule, otherwise, more = node.rule, p, None
    if rule.residual == "official":
        even = torch.ones_like(p[:1]) if node.allowed is None else node.allowed.to(p.dtype)
        otherwise = even / even.sum()
    if rule.residual != "optimal" and node.near is not None:
        wide = rule.acceptance.k + (rule.residual == "official")
        table = node.near[:, :wide]
        codes = table.flatten().expand(len(p), -1)
        order = torch.arange(table.shape[1])
        if rule.residual == "official":  # the neighbours of x count in full
            change = (p - over).gather(1, codes).view(*p.shape, -1)
            change = torch.where((absorbed > 0).unsqueeze(-1), change, 0.0)
        else:  # those whose mass x has absorbed are gone
            change = -over.gather(1, codes).view(*p.shape, -1)
            change = torch.where(order < absorbed.unsqueeze(-1), change, 0.0)
        total = total + change.sum(-1)
        more = (codes, change)
    some = total > NOTHING
    share = torch.where(some, refused / total.clamp(min=NOTHING), 0.0)
    law = over * share.sum(-1, keepdim=True)
    if more is not None:
        law = law.scatter_add(1, more[0], (more[1] * share.unsqueeze(-1)).flatten(1))
    return law + otherwise * torch.where(some, 0.0, refused).sum(-1, keepdim=True)


def _sampled_law(
    node: _Node, p: Tensor, q: Tensor, left: Tensor | None, drafts: int, uniform: Tensor
) -> Tensor:
    """Return the distributions ``[n, V]`` with ``drafts`` more to come, from ``q [n, V]``, not replaced.

    ``uniform [n, drafts]`` picks the rejections that stand for those that are not summed; the
    distribution's mean over uniforms is the token's.
    """
    none = q.sum(-1, keepdim=True) <= NOTHING
    kept, absorbed = _keep_mass(node, p, q, left)
    refused = (q - kept).clamp(min=0.0)
    if drafts == 1:
        law = kept + _last_refusals(node, p, q, refused, absorbed)
        return torch.where(none, p, law)
    n, vocab = p.shape
    most = max(int((refused > NOTHING).sum(-1).max()), 1)
    weights, x = refused.topk(min(most, node.branches(n, vocab)), -1)
    if x.shape[1] < most:
        rest = refused.scatter(-1, x, 0.0)
        x = torch.cat((x, _inverse(rest, uniform[:, 0]).unsqueeze(-1)), -1)
        weights = torch.cat((weights, rest.sum(-1, keepdim=True)), -1)
    count = x.shape[1]
    turned = (uniform[:, None, 1:] + GOLDEN * torch.arange(count).unsqueeze(1)) % 1.0
    every_p, every_q = p.repeat_interleave(count, 0), q.repeat_interleave(count, 0)
    budget = None if left is None else left.repeat_interleave(count)
    after = _refuse(node, every_p, every_q, x.flatten(), budget, drafts, turned.flatten(0, 1))
    law = kept + (weights.unsqueeze(-1) * after.view(n, count, vocab)).sum(1)
    return torch.where(none, p, law)


def _inverse(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample codes ``[n]`` from weights ``[n, V]`` of any sum."""
    total = weights.cumsum(-1)
    # A code without weight is never sampled, unless there is no other.
    return (total <= uniform.unsqueeze(-1) * total[:, -1:]).sum(-1).clamp(max=weights.shape[1] - 1)


def _refuse(
    node: _Node, p: Tensor, q: Tensor, x: Tensor, left: Tensor | None, drafts: int, uniform: Tensor
) -> Tensor:
    """Return the distribution ``[n, V]`` after codes ``x [n]`` were rejected."""
    if left is not None:
        left = allowance(left, p, q)
    test = examine(node.rule, p, q, x, node.depth, left)
    after = residual(node.rule, test, node.allowed)
    less = q.scatter(-1, x.unsqueeze(-1), 0.0)
    less = less / less.sum(-1, keepdim=True).clamp(min=NOTHING)
    rest = _rest(left, test.quality_loss, test.probability)
    return _sampled_law(node, after, less, rest, drafts - 1, uniform)


def token_cost(
    rule: Rule,
    p: Tensor,
    q: Tensor | None,
    codes: Tensor,
    uniform: Tensor,
    *,
    depth: int = 0,
    allowed: Tensor | None = None,
    branches: int | None = None,
) -> float:
    """Return the total variation between a token's distribution and the target's, or a little more.

    ``p [V]``: the target's distribution; ``q [V]``: what the drafts ``codes [m]`` were sampled from
    without replacement, None where they are certain; ``uniform [m]``: any uniforms that do not depend on
    them; ``allowed`` bool ``[V]``: codes that may stand here; ``branches``: sum a rejection over
    this many codes. Of a relaxed ``rule`` of :func:`host_rule`. Exact for certain drafts and for
    one sampled draft.
    """
    p = p.double() / p.double().sum()
    codes = codes.long()
    allowed = None if allowed is None else allowed.unsqueeze(0)
    if q is None:
        node = _Node(rule, depth, allowed, branches)
        return float((_certain_law(node, p, codes) - p).clamp(min=0.0).sum())
    q = q.double() / q.double().sum().clamp(min=NOTHING)
    drafts = min(len(codes), int((q > 0).sum()))
    if not drafts:
        return 0.0
    if rule.residual != "official" and not rule.acceptance.reads_distribution:
        # Codes that are neither sampled nor the target's are left out; as neighbours they weigh nothing.
        some = ((p > 0) | (q > 0)).nonzero().flatten()
        if rule.neighbours is not None:
            place = torch.full((len(p),), len(some)).scatter(0, some, torch.arange(len(some)))
            table = F.pad(place[rule.neighbours[some]], (0, 0, 0, 1), value=len(some))
            rule = replace(rule, neighbours=table)
        nothing = p.new_zeros(1)
        p, q = torch.cat((p[some], nothing)), torch.cat((q[some], nothing))
    node = _Node(rule, depth, allowed, branches)
    left = None if rule.budget is None else rule.budget.expand(1)
    now, drafted, numbers = (one.unsqueeze(0) for one in (p, q, uniform.double()))
    law = _sampled_law(node, now, drafted, left, drafts, numbers)[0]
    return float((law - p).clamp(min=0.0).sum())


def path_costs(
    tree: DraftTree,
    probs: Tensor,
    rule: Rule,
    uniforms: Tensor,
    path: Tensor,
    length: Tensor,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return the quality loss of every token of a walk, float32 ``[B, D]``; the host reads the step.

    Arguments as :func:`~lantern_accel.decoding.accept.accept_sampling` takes and gives them.
    """
    rule = host_rule(rule)
    out = torch.zeros(len(probs), len(tree.max_children))
    path, numbers, children = path.cpu(), uniforms.cpu(), tree.num_children.cpu()
    for image, kept in enumerate(length.tolist()):
        for depth in range(min(kept + 1, len(tree.max_children))):
            node = int(path[image, depth])
            count = int(children[image, node])
            if not count:
                continue
            first = int(tree.first_child[image, node])
            slot = sum(tree.max_children[:depth])
            q = None
            if tree.q is not None and tree.group is not None:
                q = tree.q[image, tree.group[image, node]].cpu()
            out[image, depth] = token_cost(
                rule,
                probs[image, node].cpu(),
                q,
                tree.tokens[image, first : first + count].cpu(),
                numbers[image, slot : slot + count],
                depth=depth,
                allowed=None if allowed is None else allowed[image, node].cpu(),
            )
    return out.to(probs.device)


def exact_costs(
    step: Step, tree: DraftTree, features: Tensor, logits: Tensor, accepted: Accepted
) -> Accepted:
    """Return what a step accepted with the quality loss of every token, exactly; an engine's observer.

    ``logits [B, T, V]``: guided ones of the tree. A rule that is not relaxed has no quality loss.
    """
    session, g = step.session, step.geometry
    rule = session.rule
    if not rule.relaxed or g.keyed:
        return accepted
    uniforms = session.state.get_uniforms()
    tests = uniforms[:, g.draft_columns : g.draft_columns + g.test_columns]
    official = rule.residual == "official" and step.verifying.guidance.masked
    allowed = logits > float("-inf") if official else None
    probs = distribution(logits, session.filters)
    quality_loss = path_costs(tree, probs, rule, tests, accepted.path, accepted.length, allowed)
    return replace(accepted, quality_loss=quality_loss)
