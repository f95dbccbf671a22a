"""Draft trees from plain lists, written without the product's own table builder."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_accel.decoding.trees import DraftTree


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Return every node's children; node 0 is the root and its own parent."""
    kids: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node:
            kids[parent].append(node)
    return kids


def random_parents(rng: random.Random, nodes: int, most: int = 4) -> list[int]:
    """Return a tree in which nodes have up to ``most`` children."""
    parents, node = [0], 0
    while len(parents) < nodes:
        some = rng.randint(node == len(parents) - 1, most)
        parents += [node] * min(some, nodes - len(parents))
        node += 1
    return parents


def depths_of(parents: Sequence[int]) -> list[int]:
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1 if node else 0
    return depth


def draft_tree(
    parents: Sequence[Sequence[int]],
    tokens: Tensor,
    *,
    row_rank: Sequence[Sequence[int]] | None = None,
    q: Tensor | None = None,
) -> DraftTree:
    """Build one tree an image; ``parents[b]`` lists them in breadth-first order.

    ``q [B, T, V]``: what each node's children were drawn from, so that ``group`` is the node itself.
    """
    batch, nodes = len(parents), len(parents[0])
    rows: dict[str, list[list[int]]] = {"first": [], "count": [], "depth": [], "rank": []}
    visible = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    widths = [0] * nodes
    for image, above in enumerate(parents):
        kids, depth = children_of(above), depths_of(above)
        assert depth == sorted(depth)
        for group in kids:
            assert group == list(range(group[0], group[0] + len(group))) if group else True
        for node in range(nodes):
            widths[depth[node]] = max(widths[depth[node]], len(kids[node]))
            at = node
            visible[image, node, 0] = True
            while at:
                visible[image, node, at] = True
                at = above[at]
        rows["first"].append([group[0] if group else 0 for group in kids])
        rows["count"].append([len(group) for group in kids])
        rows["depth"].append(depth)
        rows["rank"].append(list(row_rank[image]) if row_rank else list(range(nodes)))
    return DraftTree(
        tokens=tokens,
        parent=torch.tensor([list(above) for above in parents]),
        depth=torch.tensor(rows["depth"]),
        first_child=torch.tensor(rows["first"]),
        num_children=torch.tensor(rows["count"]),
        visible=visible,
        row_rank=torch.tensor(rows["rank"]),
        first_tests=torch.tensor([[sum(widths[:d]) for d in row] for row in rows["depth"]]),
        max_children=tuple(w for w in widths if w),
        q=q,
        group=torch.arange(nodes).expand(batch, -1) if q is not None else None,
    )
