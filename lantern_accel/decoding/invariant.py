"""Drafter-invariant decoding: the seed decides every token, and a draft is kept where it is that token.

Each code of each position has its own noise, an exponential ``E`` of the seed, the image, the position
and the code alone. The token of a position is ``argmax_i p_i / E_i``, which is a draw from p (the
Gumbel-max draw, with G = -log E). Plain decoding draws so, and every draft is compared with what plain
decoding would have sampled: so the image is the same, whatever was drafted. Drafters race with the same
noise on their own distribution q, since a draft that noise chose from q is the target's own choice with
probability at least ``(1 - d) / (1 + d)``, d the total variation of p and q.

Source: Daliri, Musco, Suresh (arXiv 2408.07978); SCD-GS (2510.24211) for windows. Greedy decoding is the
same comparison with the likeliest code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.accept import deepest, entry_at, row_at
from lantern_accel.decoding.logits import TokenChooser, distribution
from lantern_accel.decoding.trees import Accepted, DraftTree


def accept_invariant(
    tree: DraftTree, logits: Tensor, choices: TokenChooser, length: Tensor
) -> Accepted:
    """Keep the drafts that the target chooses itself, from guided logits ``[B, T, V]``.

    Walks down the children that are the token chosen after their parent. ``length [B]``: the position
    of the root.
    """
    if not choices.greedy:
        ops, given = choices.filters.ops, choices.filters.given
        done = ops.accept_invariant(tree, logits, given, choices.keys, length)
        if done is not None:
            return Accepted(*done)
    if choices.greedy:
        weights, chosen = logits, logits.argmax(dim=-1).to(choices.filters.ops.index)
    else:
        weights = distribution(logits, choices.filters)
        chosen = choices.of(weights, length.unsqueeze(1) + (tree.depth + 1))
    if not tree.max_children:
        node = torch.zeros_like(chosen[:, 0])
        return Accepted(node.unsqueeze(1), node, chosen[:, 0], weights[:, 0], weights[:, 0, :0])
    path, kept = deepest(tree, tree.tokens == chosen.gather(1, tree.parent))
    last = entry_at(path, kept)
    price = torch.zeros(len(path), path.shape[1] - 1, device=path.device)
    return Accepted(path, kept, entry_at(chosen, last), row_at(weights, last), price)
