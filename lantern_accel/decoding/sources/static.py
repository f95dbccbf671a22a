"""A drafter's chain or tree of a fixed shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, register
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.sources.drafter import DrafterDrafts
from lantern_accel.decoding.sources.tree import TreeState
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.device import plan
from lantern_accel.strategy.sources import ChainTree, StaticTree
from lantern_accel.strategy.trees import TreeTables


@dataclass(frozen=True)
class Level:
    """Nodes of one depth of a static tree that are run.

    ``codes`` of the level before it, and the nodes there whose ``features`` go with them, as
    :func:`columns` takes them; ``seen``: the device's form of the mask ``[M, 1, n, L - base]`` of what is
    behind the image.
    """

    codes: Tensor | None
    features: Tensor | None
    seen: Tensor


def columns(values: Tensor, numbers: Tensor | None) -> Tensor:
    """Return columns ``numbers`` of ``values [B, n, ...]``; None: all of them."""
    return values if numbers is None else values.index_select(1, numbers)


@register(ChainTree)
@register(StaticTree)
class StaticDrafts(DrafterDrafts[ChainTree | StaticTree]):
    """Draws every family of siblings from the drafter's distribution at their parent."""

    tables: TreeTables

    def __init__(self, given: DraftContext[ChainTree | StaticTree]) -> None:
        super().__init__(given)
        tables, device = self.tables, self.target.weight.device
        #: The levels behind the root's.
        self.levels: list[Level] = []
        behind = self.cache.layout.capacity - self.base
        place = {node: i for i, node in enumerate(n for level in tables.inner[1:] for n in level)}

        def numbers(of: list[int], count: int) -> Tensor | None:
            all_ = of == list(range(count))
            return None if all_ else torch.tensor(of, dtype=self.ops.index, device=device)

        order, drawn = [0], 1  # the root, then the picks of all levels
        for depth, (level, width) in enumerate(zip(tables.inner, tables.max_children, strict=True)):
            group = {node: i for i, node in enumerate(level)}
            pick = {
                n: group[parent] * width + rank
                for parent in level
                for rank, n in enumerate(tables.children[parent])
            }
            order += [drawn + one for one in pick.values()]
            drawn += len(level) * width
            following = tables.inner[depth + 1] if depth + 1 < len(tables.inner) else []
            if not following:
                break
            seen = torch.zeros(1, len(following), behind, dtype=torch.bool)
            for i, node in enumerate(following):
                while node:
                    seen[0, i, place[node]] = True
                    node = tables.parents[node]
            codes = numbers([pick[n] for n in following], len(level) * width)
            features = numbers([group[tables.parents[n]] for n in following], len(level))
            mask = self._mask(seen.repeat(self.branches.masks, 1, 1).to(device)).clone()
            self.levels.append(Level(codes, features, mask))
            self.written.append(self._scratch(place[following[0]], len(following)))
        #: Which of the root and the picks are nodes of the tree.
        self.order = numbers(order, drawn)

    def draft(self, state: TreeState) -> DraftTree:
        """Catch up and propose a tree."""
        uniforms = None if self.geometry.keyed else state.get_uniforms()
        ahead, features = self.catch_up(state)
        tokens, dists = [state.root.unsqueeze(1)], []
        used = 0
        for depth, width in enumerate(self.tables.max_children):
            logits = self._guide(ahead, depth, features)
            groups = logits.shape[1]
            if self.choices.greedy:
                picks = self.ops.best(logits, width)[1]
            else:
                q = distribution(logits, self.filters)
                if uniforms is None:
                    places = (state.length + (depth + 1)).unsqueeze(1).expand(-1, groups)
                    picks = self.choices.rank(q, places, width)
                else:
                    here = uniforms[:, used : used + groups * width].view(-1, groups, width)
                    used += groups * width
                    picks = self.filters.sample(q, here)
                    dists.append(q)
            codes = picks.flatten(1)
            tokens.append(codes)
            if depth < len(self.levels):
                level = self.levels[depth]
                codes, features = columns(codes, level.codes), columns(features, level.features)
                features = self._level(ahead, depth + 1, codes, features, level.seen)
        drafted = columns(torch.cat(tokens, dim=1), self.order)
        return self.tree(drafted, torch.cat(dists, dim=1) if dists else None)

    def describe(self, state: TreeState) -> plan.StaticTreePlan:
        tables = self.tables
        return plan.StaticTreePlan(
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
