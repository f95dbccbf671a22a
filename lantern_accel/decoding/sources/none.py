"""Drafts nothing: plain decoding, one token a step."""

from __future__ import annotations

from torch import Tensor

from lantern_accel.decoding.sources.base import Drafts, register
from lantern_accel.decoding.state import State
from lantern_accel.decoding.trees import DraftTree, Written
from lantern_accel.device.plan import NoDrafts
from lantern_accel.strategy.values import NoTree


@register(NoTree)
class Nothing(Drafts[NoTree]):
    """Proposes the root alone."""

    def draft(self, state: State, uniforms: Tensor | None, window: Written | None) -> DraftTree:
        return self.tree(state.root.unsqueeze(1), None, window)

    def planned(self, state: State) -> NoDrafts:
        return NoDrafts(state.root)
