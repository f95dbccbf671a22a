"""Where the tokens of a window lie: each in the slot of its position in the image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, Drafts, Value
from lantern_accel.decoding.state import WindowState
from lantern_accel.device.operations import flags


@dataclass(frozen=True)
class Coupled:
    """One step's outcome for ``B`` images and the ``L`` positions behind the last known token.

    ``tokens`` integer ``[B, L]``: the new ones, the bonus last; ``count`` integer ``[B]`` or ``[1]``: how
    many of them are known now, 1 to L.
    """

    tokens: Tensor
    count: Tensor


@dataclass(frozen=True)
class WindowKept:
    """What a step kept of a window, before the state's length moves on.

    ``window [B, L]``: the tokens that the pass saw; ``coupled``: what came of them; ``newest [B]``: the
    last position that a pass has predicted; ``features [R, L, D]``: the target's.
    """

    window: Tensor
    coupled: Coupled
    newest: Tensor
    features: Tensor


class WindowLayout(Drafts[Value, WindowState, Tensor, Coupled, WindowKept]):
    """Node i of a window is image token ``n + i``, n the last known one, in the slot of its number.

    So a window moves on by a larger ``length``. Where a pass looks at fewer slots, the last of these is
    the trash: a pass over more has an image position there, and writes it before any pass sees it.
    """

    state_type = WindowState

    def __init__(self, given: DraftContext[Value]) -> None:
        super().__init__(given)
        depth, index, device = given.geometry.depth, self.ops.index, self.verifying.slots.device
        self.chain = torch.arange(depth + 1, dtype=index, device=device)
        self.ahead = torch.arange(1, depth + 2, dtype=index, device=device)

    def verify(
        self, state: WindowState, drafted: Tensor, slots: int | None = None
    ) -> tuple[Tensor, Tensor]:
        v, g, length = self.verifying, self.geometry, state.length
        seen = min(slots or g.target_slots, g.target_slots)
        room = seen - g.prefix - 1  # the image's
        place = length.unsqueeze(1) + self.chain
        cells = place.clamp(max=g.tokens - 1)
        following = (cells + 1).clamp(max=g.tokens - 1)
        at = torch.where(place < room, g.prefix + place, seen - 1)
        past = v.slots[g.prefix : g.prefix + room] <= (place + g.prefix).unsqueeze(-1)
        nodes = place.shape[1]
        prompt = state.prefix_mask.unsqueeze(1).expand(-1, nodes, -1)
        rest = v.cache.layout.capacity - seen if seen == g.target_slots else 0
        hidden = flags(False, len(prompt), nodes, 1 + rest, device=prompt.device)
        visible = torch.cat((prompt, v.branches.masked(past), hidden), dim=-1)
        if v.ops.preferences.skips_finished_rows and g.batch > 1:
            visible &= v.branches.masked(length < g.tokens - 1).view(-1, 1, 1)
        return v.run(state, drafted, cells, following, at, visible)

    def keep(
        self, state: WindowState, drafted: Tensor, features: Tensor, judged: Coupled
    ) -> WindowKept:
        positions = state.length.unsqueeze(1) + self.ahead
        state.tokens.scatter_(1, positions.clamp(max=self.geometry.tokens), judged.tokens)
        # A longer window may have seen more before this one.
        newest = torch.maximum(state.newest, positions[:, -1])
        state.newest.copy_(newest)
        return WindowKept(drafted, judged, newest, features)

    def advance(self, state: WindowState, judged: Coupled, kept: WindowKept) -> None:
        last = self.geometry.tokens - 1
        open_ = state.length < last
        length = (state.length + judged.count).clamp(max=last)
        gained = length - state.length
        state.advance(length, gained, open_, gained - 1)
