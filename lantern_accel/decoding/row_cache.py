"""Recalls drafts behind a replacement from an earlier pass that had the same past (this project's)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.device.operations import TensorOps


class Recalled(Protocol):
    """What a window's state keeps of earlier passes, integer ``[B, M, L]``, and its ``step``.

    ``row_keys``: which position a choice is of and which token it followed, as one number;
    ``row_previous``: the token before that; ``row_tokens``: the token chosen.
    """

    step: Tensor
    row_keys: Tensor
    row_previous: Tensor
    row_tokens: Tensor


class RowCache:
    """Finds what one of the last passes chose behind the same past."""

    def __init__(self, g: Geometry, device: torch.device, ops: TensorOps) -> None:
        self.passes, self.vocab, self.ops = g.passes, g.vocab, ops
        self.ahead = torch.arange(g.nodes, dtype=ops.index, device=device)
        self.order = torch.arange(g.passes, dtype=ops.index, device=device)

    def find(
        self, state: Recalled, places: Tensor, left: Tensor, earlier: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what was chosen for positions ``places [B, S]``, and whether anything was.

        Integer and bool ``[B, S]``. ``left``: the token on the left of each, ``earlier``: the one before
        that. The latest pass comes first, and before it one in which the earlier token agrees too.
        """
        wide = state.row_keys.shape[2]
        # Read now: their writes need less than what is compared with them.
        rows = (state.row_keys, state.row_previous, state.row_tokens)
        keys, previous, chosen = (self.ops.held(t).flatten(1).unsqueeze(1) for t in rows)
        hit = keys == (places * self.vocab + left).unsqueeze(-1)
        age = (self.order - state.step - 1) % self.passes
        recent = 1 + age.unsqueeze(1).expand(-1, wide).flatten()
        worth = torch.where(previous == earlier.unsqueeze(-1), recent + self.passes, recent)
        entry = torch.where(hit, worth, 0).argmax(dim=-1).to(self.ops.index)
        return chosen.squeeze(1).gather(1, entry), hit.any(dim=-1)

    def write(self, state: Recalled, places: Tensor, x: Tensor, chosen: Tensor) -> None:
        """Keep what a pass chose for ``places [B, L]``, behind the window's tokens ``x [B, L]``."""
        # A shorter window on a longer one's buffers leaves older rows behind its own: they stay true.
        at = (state.step % self.passes) * state.row_keys.shape[2] + self.ahead
        self.ops.put(state.row_tokens, 1, at, chosen)
        self.ops.put(state.row_keys, 1, at, places * self.vocab + x)
        # What is before the first lies outside the window; the token itself stands for it.
        self.ops.put(state.row_previous, 1, at, torch.cat((x[:, :1], x[:, :-1]), dim=1))
