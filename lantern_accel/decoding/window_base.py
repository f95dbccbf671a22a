"""Declares what a window's engine has, whichever way its drafts are made and judged."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.draft_init import DraftInitializer
from lantern_accel.decoding.row_cache import RowCache
from lantern_accel.decoding.siblings import Siblings
from lantern_accel.decoding.window import Ring, WindowGeometry, WindowPass, WindowState
from lantern_accel.strategy.values import Window

#: Shares of a sibling's own distribution, its left neighbour's and the one above it, by measurement
#: (docs/jacobi.md); their sum does not matter.
SIBLING_SHARES = (1.0, 2.0, 1.0)


class WindowBase(EngineBase):
    """The buffers and constants of a window, and what drafts are drawn from."""

    geometry: WindowGeometry
    state: WindowState
    window: Window
    ring: Ring
    fresh: DraftInitializer
    siblings: Siblings
    forward: WindowPass
    ahead: Tensor
    """The places of the window's chain behind the last known token, ``[L]`` from 1."""
    longest_window: int
    """The longest window on these buffers."""

    def row_cache(self) -> RowCache | None:
        """Return the rows of earlier passes; None where none are recalled."""
        g = self.geometry
        if not g.passes:
            return None
        return RowCache(
            g.passes, self.window.length, g.tokens, g.vocab, self.ops.index, self.state.length.device,
            self.ops, self.filters.draws,
        )  # fmt: skip

    def rows_of(self, left: Tensor, above: Tensor) -> Tensor | None:
        """Return what fresh drafts are drawn from, ``[B, T, V]``; None where any code will do.

        ``left, above``: positions ``[B, T]`` (:meth:`.DraftInitializer.sources`).
        """
        fresh, q = self.fresh, self.state.q
        if not fresh.reads:
            return None
        given = self.ring.read(q, fresh.near(left, above))
        if fresh.kind in ("left", "above"):
            return given
        return fresh.blend(self.ring.read(q, left), given)

    def sibling_rows(self, chain: Tensor) -> Tensor:
        """Return what the siblings of the first drafts are drawn from, ``[B, D, V]``, of any sum.

        ``chain [B, L]``: the window's positions. Where a draft is refused its own distribution was a bad
        guess, most often because it was made for another token on the left. So that token's own
        distribution is mixed in, and the one above.
        """
        deep, q = len(self.siblings.counts), self.state.q
        newest = chain[:, :1]
        own = self.ring.read(q, chain[:, 1 : 1 + deep])
        left = self.ring.read(q, chain[:, :deep])
        places = self.fresh.above(newest + self.ahead[:deep])
        places = torch.where(places < 0, newest, places).clamp(min=0)
        above = self.ring.read(q, places)
        one, two, three = SIBLING_SHARES
        rows = one * own + two * left + three * above
        return self.fresh.rows(rows, newest + self.ahead[:deep])
