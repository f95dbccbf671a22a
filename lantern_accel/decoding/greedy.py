"""Acceptance at temperature 0: the longest path on which every draft is the most likely code."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.strategy.values import Tried


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
    likeliest = x == parent_best
    accepted = likeliest
    if rule.relaxed:
        probs = logits.softmax(dim=-1)
        flat = probs.flatten(1)
        base = tree.parent * vocab
        px = flat.gather(1, base + x)
        top = flat.gather(1, base + parent_best)
        near = flat.new_zeros(batch, nodes, 0)
        if rule.neighbours is not None and rule.acceptance.k:
            codes = rule.neighbours[:, : rule.acceptance.k].index_select(0, x.flatten()).to(x.dtype)
            codes = codes.view(batch, nodes, -1) + base.unsqueeze(-1)
            near = flat.gather(1, codes.flatten(1)).view(codes.shape)
        level = (tree.depth - 1).clamp(min=0)
        rows = probs[..., :0]
        if rule.acceptance.reads_distribution:
            rows = probs.gather(1, tree.parent.unsqueeze(-1).expand(-1, -1, vocab))
        tried = Tried(px, torch.ones_like(px), near, rows, x, level)
        total = px + rule.borrowed(tried)[1]
        accepted = accepted | (total > top) | ((total == top) & (x < parent_best))
    root = torch.arange(nodes, dtype=best.dtype, device=logits.device) == 0
    accepted = accepted | root
    for _ in range(depth):
        accepted = accepted & accepted.gather(1, tree.parent)
    reached = torch.where(accepted, tree.depth, -1)
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
    other = ~likeliest.gather(1, path)[:, 1:] & (levels[:, 1:, 0] <= length.unsqueeze(1))
    return Accepted(path, length, bonus, weights, other.float())
