"""No drafts: plain decoding, one token a step."""

from __future__ import annotations

from torch import Tensor

from lantern_accel.decoding.sources.base import CertainDrafts, register
from lantern_accel.decoding.state import State
from lantern_accel.device.plan import NoDrafts
from lantern_accel.strategy.values import NoTree


@register(NoTree)
class Nothing(CertainDrafts[NoTree]):
    """Proposes the root alone."""

    def guess(self, state: State) -> Tensor:
        return state.root.new_zeros(len(state.root), 0)

    def planned(self, state: State) -> NoDrafts:
        return NoDrafts(state.root)
