"""EAGLE-2's tree (arXiv 2406.16858): the best nodes of a beam of a drafter's paths."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, register
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.sources.drafter import DrafterDrafts
from lantern_accel.decoding.sources.tree import TreeState
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.device import plan
from lantern_accel.device.sampling import FLOOR
from lantern_accel.strategy.sources import DynamicTree


@register(DynamicTree)
class BeamDrafts(DrafterDrafts[DynamicTree]):
    """Keeps the most likely of all nodes that a beam has seen."""

    def __init__(self, given: DraftContext[DynamicTree]) -> None:
        super().__init__(given)
        k, index, device = given.config.top_k, self.ops.index, self.slots.device
        self.own = torch.eye(k, dtype=index, device=device).repeat(self.geometry.batch, 1, 1)
        self.written = [self._scratch(level * k, k) for level in range(given.config.depth)]

    @classmethod
    def columns(cls, g: Geometry, value: DynamicTree) -> Geometry:
        tests = 0 if g.keyed else value.top_k * g.depth
        return replace(g, scratch=value.depth * value.top_k, test_columns=tests)

    def describe(self, state: TreeState) -> plan.DynamicTreePlan:
        tree = self.given.config
        return plan.DynamicTreePlan(tree.top_k, tree.depth, tree.total, self.tree_buffers(state))

    def _likeliest(self, logits: Tensor, count: int, luck: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the ``count`` likeliest codes are predicted to give, as logarithms, and the codes.

        ``[B, n, count]`` each, of ``logits [B, n, V]``. ``luck [B, 1, V]``: where noise decides, codes
        count with that of their position, as the target will choose.
        """
        if self.choices.greedy:
            return self.ops.best(logits.log_softmax(dim=-1).clamp(min=FLOOR), count)
        return self.ops.likeliest(distribution(logits, self.filters), count, luck)

    def _luck(self, state: TreeState, levels: int) -> list[Tensor | None]:
        """Return one over the noise of the next positions, ``[B, 1, V]`` each; None without noise."""
        g = self.geometry
        if self.choices.greedy or not g.keyed:
            return [None] * levels
        places = state.length.unsqueeze(1) + self.slots[1 : levels + 1]
        even = torch.ones(g.batch, levels, g.vocab, device=places.device)
        return list(torch.split(self.choices.scores(even, places), 1, dim=1))

    def draft(self, state: TreeState) -> DraftTree:
        """Catch up and propose a tree: a beam of ``top_k`` paths, ``depth`` further levels.

        The pool is laid out as ``top_k`` first-level candidates, then ``top_k`` rows of ``top_k``
        children a level; flat index f sits in row ``f // top_k``.
        """
        ahead, features = self.catch_up(state)
        tree = self.given.config
        batch, k = self.geometry.batch, tree.top_k
        device = features.device
        luck = self._luck(state, tree.depth + 1)
        found = self._likeliest(self._guide(ahead, 0, features), k, luck[0])
        scores, codes = (one[:, 0] for one in found)
        pool_codes, pool_scores = [codes], [scores]
        #: For every row of the pool: the flat index + 1 of the node whose children it holds.
        origin = [torch.zeros(batch, 1, dtype=self.ops.index, device=device)]
        beam_flat = torch.arange(k, dtype=self.ops.index, device=device).expand(batch, -1)
        features = features.expand(-1, k, -1)
        behind = self.cache.layout.capacity - self.base
        seen = torch.zeros(batch, k, behind, dtype=self.ops.index, device=device)
        for level in range(tree.depth):
            first = level * k
            seen = torch.cat((seen[..., :first], self.own, seen[..., first + k :]), dim=-1)
            mask = self._mask(self.branches.repeat_images(seen) > 0)
            features = self._level(ahead, level + 1, codes, features, mask)
            guided = self._guide(ahead, level + 1, features)
            best, children = self._likeliest(guided, k, luck[level + 1])
            # A child ranks strictly below its parent, so that ties cannot part the two.
            margin = scores.abs().unsqueeze(-1) * 2.0**-22 + 2.0**-30
            total = scores.unsqueeze(-1) + best.clamp(max=0.0) - margin
            pool_codes.append(children.flatten(1))
            pool_scores.append(total.flatten(1))
            origin.append(beam_flat + 1)
            scores, pick = self.ops.best(total.flatten(1), k)
            codes = children.flatten(1).gather(1, pick)
            row = pick // k
            beam_flat = k + level * k * k + pick
            rows = self._rows(row).unsqueeze(-1).expand(-1, -1, features.shape[-1])
            features = features.gather(1, rows)
            seen = seen.gather(1, row.unsqueeze(-1).expand(-1, -1, seen.shape[-1]))
        kept = self.ops.best(torch.cat(pool_scores, dim=1), tree.total - 1)[1]
        return self._link(
            state.root, tree, torch.cat(pool_codes, dim=1), kept, torch.cat(origin, dim=1)
        )

    @staticmethod
    def _link(
        root: Tensor, tree: DynamicTree, codes: Tensor, kept: Tensor, origin: Tensor
    ) -> DraftTree:
        """Link the candidates ``kept [B, total - 1]``, in the order of the pool."""
        batch, total, k = root.shape[0], tree.total, tree.top_k
        device = root.device
        kept = kept.sort(dim=-1).values
        tokens = torch.cat((root.unsqueeze(1), codes.gather(1, kept)), dim=1)
        parent_flat = origin.gather(1, kept // k)
        # Node ids by flat index + 1; the root has flat index -1.
        flat = torch.cat((torch.zeros_like(root).unsqueeze(1), kept + 1), dim=1)
        # Their rank, by counting: some devices have no kernel for searchsorted.
        parent = (flat.unsqueeze(1) < parent_flat.unsqueeze(-1)).sum(dim=-1, dtype=root.dtype)
        parent = torch.cat((torch.zeros_like(root).unsqueeze(1), parent), dim=1)
        ids = torch.arange(total, dtype=root.dtype, device=device).expand(batch, -1)
        link = (parent.unsqueeze(-1) == ids.unsqueeze(1)) & (ids.unsqueeze(-1) > 0)
        visible = (ids.unsqueeze(-1) == ids.unsqueeze(1)).to(root.dtype)
        for _ in range(tree.depth + 1):
            above = visible.gather(1, parent.unsqueeze(-1).expand(-1, -1, total))
            visible = torch.maximum(visible, above)
        depth = visible.sum(dim=-1, dtype=root.dtype) - 1
        is_child = link.transpose(1, 2)
        num_children = is_child.sum(dim=-1, dtype=root.dtype)
        first_child = is_child.to(torch.int32).argmax(dim=-1).to(root.dtype)
        # Greedy prefers the path whose leaf comes first.
        leaf = (num_children == 0).unsqueeze(-1) & (visible > 0)
        row_rank = torch.where(leaf, ids.unsqueeze(-1), total).amin(dim=1)
        return DraftTree(
            tokens=tokens,
            parent=parent,
            depth=depth,
            first_child=first_child,
            num_children=num_children,
            visible=visible,
            row_rank=row_rank,
            max_children=(k,) * (tree.depth + 1),
            first_tests=depth * k,
        )
