"""Drafter-invariant decoding: the seed decides every token, and a draft is kept where it is that token.

Each code of each position has its own noise, an exponential ``E`` of the seed, the image, the position
and the code alone. The token of a position is ``argmax_i p_i / E_i``, which is a draw from p (the
Gumbel-max draw, with G = -log E). Plain decoding draws so, and every draft is compared with what plain
decoding would have drawn: so the image is the same, whatever was drafted. Drafters race with the same
noise on their own distribution q, since a draft that noise chose from q is the target's own choice with
probability at least ``(1 - d) / (1 + d)``, d the total variation of p and q.

Source: Daliri, Musco, Suresh (arXiv 2408.07978); SCD-GS (2510.24211) for windows. Greedy decoding is the
same comparison with the likeliest code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted, entry_at, row_at
from lantern_accel.decoding.logits import Filters, distribution
from lantern_accel.decoding.trees import DraftTree

#: Numbers of a table that are computed at once, so that what they need on the way stays small.
PIECE = 1 << 24


@dataclass(frozen=True)
class Choices:
    """Chooses the tokens of positions, by noise from filtered logits or greedily the likeliest.

    ``keys`` int32 ``[B, 3]``, a buffer that a step reads anew: the seed's low and high word, and the
    image's number in its request (:mod:`lantern_accel.device.noise`). ``table`` float32 ``[B, N, V]``:
    the noise of all positions, which :meth:`prepare` makes once per image; None: every step makes that
    of its own. The bits are the same, so that the picture is.
    """

    keys: Tensor
    filters: Filters
    greedy: bool
    table: Tensor | None = None
    first: Tensor | None = field(init=False, repr=False, compare=False)
    """Where an image's rows begin in the table, ``[B, 1]``; None with one image."""

    def __post_init__(self) -> None:
        first, table = None, self.table
        if table is not None and len(table) > 1:
            images = torch.arange(len(table), dtype=self.filters.ops.index, device=table.device)
            first = images.unsqueeze(1) * table.shape[1]
        object.__setattr__(self, "first", first)

    def prepare(self) -> None:
        """Make the table of a request's keys; steps read it. No value is read by the host."""
        if self.table is None:
            return
        images, tokens, codes = self.table.shape
        ops, many = self.filters.ops, max(1, PIECE // (images * codes))
        places = torch.arange(tokens, dtype=torch.int32, device=self.table.device)
        parts = [
            ops.noise(self.keys, some.expand(images, -1), codes)
            for some in torch.split(places, many)
        ]
        self.table.copy_(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def scores(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Return ``weights [B, T, V]`` over the noise of ``positions [B, T]``."""
        if self.table is None:
            return self.filters.ops.perturb(weights, self.keys, positions)
        # What is past the image is drawn from any noise: nobody reads it.
        at = positions.clamp(max=self.table.shape[1] - 1)
        if self.first is not None:
            at = at + self.first
        rows = self.table.flatten(0, 1).index_select(0, at.flatten())
        return weights / rows.view(*positions.shape, -1)

    def of(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Return the codes ``[B, T]`` that win at ``positions``, of ``weights [B, T, V]`` of any sum."""
        ops = self.filters.ops
        if self.table is None:
            return ops.race(weights, self.keys, positions)
        return self.scores(weights, positions).argmax(dim=-1).to(ops.index)

    def ranked(self, weights: Tensor, positions: Tensor, count: int) -> Tensor:
        """Return the first ``count`` codes of the race, the winner first: ``[B, T, count]``."""
        ops = self.filters.ops
        if self.table is None:
            return ops.race(weights, self.keys, positions, count)
        return self.scores(weights, positions).topk(count, dim=-1).indices.to(ops.index)


def accept_invariant(tree: DraftTree, logits: Tensor, choices: Choices, length: Tensor) -> Accepted:
    """Keep the drafts that the target chooses itself, from guided logits ``[B, T, V]``.

    Walks down the children that are the token chosen after their parent. ``length [B]``: the position of
    the root. The device does all of it at once where it has a kernel,
    which then looks at the rows that are visited alone.
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
        chosen = choices.of(weights, length.unsqueeze(1) + tree.ahead().chunk(2, dim=1)[1])
    depth = len(tree.max_children)
    if not depth:
        node = torch.zeros_like(chosen[:, 0])
        return Accepted(node.unsqueeze(1), node, chosen[:, 0], weights[:, 0], weights[:, 0, :0])
    # Siblings differ, so that no two paths are kept.
    root = torch.arange(chosen.shape[1], dtype=chosen.dtype, device=chosen.device) == 0
    accepted = root | (tree.tokens == chosen.gather(1, tree.parent))
    for _ in range(depth):
        accepted = accepted & accepted.gather(1, tree.parent)
    levels = torch.arange(depth + 1, dtype=chosen.dtype, device=chosen.device).view(1, -1, 1)
    on_path = accepted.unsqueeze(1) & (tree.depth.unsqueeze(1) == levels)
    path = on_path.to(torch.int32).argmax(dim=-1).to(chosen.dtype)
    kept = torch.where(accepted, tree.depth, 0).amax(dim=1)
    last = entry_at(path, kept)
    row = row_at(weights, last)
    return Accepted(path, kept, entry_at(chosen, last), row, weights.new_zeros(len(row), depth))
