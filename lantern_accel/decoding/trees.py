"""Lays draft trees out as tables of fixed size.

Node 0 is the root: a token that is known but not yet run through the target. Parents come before
their children, and the children of a node are consecutive, in the order in which they are tried.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.plan import DraftedTree
from lantern_accel.strategy.trees import TreeTables


@dataclass(frozen=True, kw_only=True)
class DraftTree(DraftedTree):
    """One tree an image: the topology, the drafted tokens and what they were sampled from.

    ``B`` images, ``T`` nodes, int64. ``parent, depth, row_rank [B, T]``; ``visible [B, T, T]``: 1 where
    row i sees an ancestor or itself. ``row_rank`` orders paths of equal length (greedy takes the lowest).
    ``inner [B, G]``: the node of each group, in the order of groups; None: every node is one, whether it
    has children or not.
    """

    parent: Tensor
    depth: Tensor
    visible: Tensor
    row_rank: Tensor
    inner: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """What one step keeps, for ``B`` images.

    ``path`` integer ``[B, D + 1]``: nodes from the root on, valid up to ``length``, and behind it nodes
    that it has already; ``length`` integer ``[B]``: accepted drafts; ``bonus`` integer ``[B]``: the token
    after the path (the next root); ``weights`` float32 ``[B, V]``: what it was sampled from;
    ``quality_loss`` float32 ``[B, D]``: what relaxation cost the token after each node of the path. Its
    expectation bounds the total variation between the distribution of that token and the target's; at
    temperature 0 it is 1 where the token is not the argmax.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    weights: Tensor
    quality_loss: Tensor


def topology_of(
    tables: TreeTables, batch: int, device: torch.device, index: torch.dtype = torch.int64
) -> dict[str, Any]:
    """Return the tensors of :class:`DraftTree` that do not depend on the drafts."""
    first = [kids[0] if kids else 0 for kids in tables.children]
    groups = {node: g for g, node in enumerate(i for level in tables.inner for i in level)}
    group = [groups.get(i, 0) for i in range(tables.nodes)]
    tests = [0, *itertools.accumulate(tables.max_children)]
    visible = torch.eye(tables.nodes, dtype=index)
    for i, parent in enumerate(tables.parents):
        visible[i] |= visible[parent]

    def table(values: list[int]) -> Tensor:
        one = torch.tensor(values, dtype=index)
        return one.repeat(batch, 1).to(device)

    return {
        "parent": table(tables.parents),
        "depth": table(tables.depths),
        "first_child": table(first),
        "num_children": table([len(kids) for kids in tables.children]),
        "row_rank": table(list(range(tables.nodes))),
        "first_tests": table([tests[depth] for depth in tables.depths]),
        "group": table(group),
        "inner": table(list(groups)),
        "visible": visible.repeat(batch, 1, 1).to(device),
    }
