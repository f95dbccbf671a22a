"""A drafter's chain or tree of a fixed shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, register
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.sources.drafter import DrafterDrafts
from lantern_accel.decoding.state import TreeState
from lantern_accel.decoding.trees import DraftTree, TreeTables
from lantern_accel.device import plan
from lantern_accel.strategy.values import ChainTree, StaticTree


class ColumnSelection:
    """Columns of a tensor, by numbers that are known beforehand: a view where they are one after another.

    Also where they are one column, several times.
    """

    def __init__(self, numbers: list[int], device: torch.device, index: torch.dtype) -> None:
        self.first, self.count = (numbers or [0])[0], len(numbers)
        self.same = len(set(numbers)) == 1
        self.index: Tensor | None = None
        if not self.same and numbers != list(range(self.first, self.first + self.count)):
            self.index = torch.tensor(numbers, dtype=index, device=device)

    def of(self, values: Tensor) -> Tensor:
        """Return the columns of ``values [B, n, ...]``."""
        if self.index is not None:
            return values.index_select(1, self.index)
        if self.same:
            shape = (len(values), self.count, *values.shape[2:])
            return values[:, self.first : self.first + 1].expand(shape)
        return values[:, self.first : self.first + self.count]


@dataclass(frozen=True)
class Level:
    """Nodes of one depth of a static tree that are run.

    ``codes`` of the level before it, and the nodes there whose ``features`` go with them; ``seen``: the
    device's form of the mask ``[M, 1, n, L - base]`` of what is behind the image.
    """

    codes: ColumnSelection
    features: ColumnSelection
    seen: Tensor


@register(ChainTree)
@register(StaticTree)
class StaticDrafts(DrafterDrafts[ChainTree | StaticTree]):
    """Draws every family of siblings from the drafter's distribution at their parent."""

    def __init__(self, given: DraftContext[ChainTree | StaticTree]) -> None:
        super().__init__(given)
        #: Which picks of each level are nodes of the tree, and the levels behind the root's.
        self.kept: list[ColumnSelection] = []
        self.levels: list[Level] = []
        assert self.tables is not None
        self._plan_levels(self.tables, self.target.weight.device)

    def _plan_levels(self, tables: TreeTables, device: torch.device) -> None:
        """Prepare the tables of each level of a static tree."""
        inner = [node for level in tables.inner[1:] for node in level]
        place = {node: i for i, node in enumerate(inner)}
        order, drawn, first = [0], 1, 0  # the root, then the picks of all levels
        behind = self.cache.layout.capacity - self.base
        for depth, level in enumerate(tables.inner):
            group = {node: i for i, node in enumerate(level)}
            below = [i for i in range(tables.nodes) if tables.depths[i] == depth + 1]
            width = tables.max_children[depth]
            rank = {n: n - tables.children[tables.parents[n]][0] for n in below}
            picks = [group[tables.parents[n]] * width + rank[n] for n in below]
            self.kept.append(ColumnSelection(picks, device, self.ops.index))
            order += [drawn + pick for pick in picks]
            drawn += len(level) * width
            if depth + 1 == len(tables.inner):
                break
            following = tables.inner[depth + 1]
            inputs = [picks[below.index(n)] for n in following]
            parents = [group[tables.parents[n]] for n in following]
            seen = torch.zeros(1, len(following), behind, dtype=torch.bool)
            for i, node in enumerate(following):
                while node:
                    seen[0, i, place[node]] = True
                    node = tables.parents[node]
            self.levels.append(
                Level(
                    ColumnSelection(inputs, device, self.ops.index),
                    ColumnSelection(parents, device, self.ops.index),
                    self._mask(seen.repeat(self.branches.masks, 1, 1).to(device)).clone(),
                )
            )
            self.written.append(self._scratch(first, len(following)))
            first += len(following)
        # ColumnSelection that are not views of their level are taken of all levels at once.
        self.order = ColumnSelection(order, device, self.ops.index)
        if any(one.index is not None for one in self.kept):
            self.kept = []

    def draft(self, state: TreeState) -> DraftTree:
        """Catch up and propose a tree."""
        uniforms, tables = self.drawn(state), self.tables
        assert tables is not None
        ahead, features = self._catch_up(state)
        batch = self.geometry.batch
        tokens, dists = [state.root.unsqueeze(1)], []
        used = 0
        for depth, width in enumerate(tables.max_children):
            logits = self._guided(ahead, depth, features)
            groups = logits.shape[1]
            if self.choices.greedy:
                picks = self.ops.best(logits, width)[1]
            elif uniforms is None:
                q = distribution(logits, self.filters)
                places = (state.length + (depth + 1)).unsqueeze(1).expand(-1, groups)
                picks = self.choices.ranked(q, places, width)
            else:
                q = distribution(logits, self.filters)
                here = uniforms[:, used : used + groups * width].view(batch, groups, width)
                used += groups * width
                picks = self.filters.draw(q, here)
                dists.append(q)
            codes = picks.flatten(1)
            tokens.append(self.kept[depth].of(codes) if self.kept else codes)
            if depth < len(self.levels):
                level = self.levels[depth]
                features = self._level(
                    ahead, depth + 1, level.codes.of(codes), level.features.of(features), level.seen
                )
        drafted = torch.cat(tokens, dim=1)
        rows = torch.cat(dists, dim=1) if dists else None
        nodes = drafted if self.kept else self.order.of(drafted)
        return self.tree(state, nodes, rows, uniforms)

    def describe(self, state: TreeState) -> plan.StaticTree:
        tables = self.tables
        assert tables is not None
        return plan.StaticTree(
            parents=tuple(tables.parents),
            depths=tuple(tables.depths),
            inner=tuple(tuple(level) for level in tables.inner),
            widths=tables.max_children,
            draft_columns=self.geometry.draft_columns,
            first_child=self.topology["first_child"],
            num_children=self.topology["num_children"],
            group=self.topology["group"],
            buffers=self.tree_buffers(state),
        )
