"""Drafts nothing: plain decoding, one token a step."""

from __future__ import annotations

from lantern_accel.decoding.drafts import register
from lantern_accel.decoding.sources.tree import TreeDrafts, TreeState
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.device.plan import NoDrafts
from lantern_accel.strategy.sources import NoTree


@register(NoTree)
class Nothing(TreeDrafts[NoTree]):
    """Proposes the root alone."""

    def draft(self, state: TreeState) -> DraftTree:
        return self.tree(state.root.unsqueeze(1), None)

    def describe(self, state: TreeState) -> NoDrafts:
        return NoDrafts(state.root)
