"""Runs the target over a window of drafts, and finds the distributions that these were drawn from.

Everything lies at its position in the image: a token and, while it is a draft, the distribution that it
was drawn from; keys and values. So the window moves on by a larger ``length``, and nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.state import RequestState
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps, flags


class Ring:
    """Finds the rows of :attr:`.WindowState.q` that belong to positions; past the image is trash."""

    def __init__(
        self,
        kept: int,
        tokens: int,
        ahead: int,
        batch: int,
        ops: TensorOps,
        device: torch.device,
    ) -> None:
        index = ops.index
        place = torch.arange(tokens + ahead, dtype=index, device=device) % kept
        place[tokens:] = kept
        self.place, self.ops = place, ops
        self.first = torch.arange(batch, dtype=index, device=device).unsqueeze(1) * (kept + 1)

    def _rows(self, positions: Tensor) -> Tensor:
        place = self.place.index_select(0, positions.flatten()).view(positions.shape)
        return (place + self.first).flatten()

    def read(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return the distributions ``[B, T, V]`` of positions ``[B, T]``."""
        flat = q.flatten(0, 1).index_select(0, self._rows(positions))
        return flat.view(*positions.shape, -1)

    def write(self, q: Tensor, positions: Tensor, values: Tensor) -> None:
        """Store the distributions ``[B, T, V]`` of positions ``[B, T]``."""
        self.ops.put(q, 0, self._rows(positions), values.flatten(0, 1))


class WindowPass:
    """The target's pass over a chain of ``length`` tokens and the siblings of its first drafts.

    Node i of the chain is image token ``n + i``, with n the last known one, and writes its keys and
    values where they will stay; a sibling sees what its draft sees, and writes to a scratch slot. With
    ``slots`` a pass looks at that many of the cache, the first ones: scratch and trash are then the last
    of these. A pass over more has image positions there, and writes each before any pass sees it.
    """

    def __init__(
        self,
        verifying: Verifying,
        geometry: Geometry,
        siblings: tuple[int, ...],
        slots: int | None = None,
    ) -> None:
        self.verifying, self.geometry = verifying, geometry
        g, index = geometry, verifying.ops.index
        #: How many slots a pass looks at, and how many of them are the image's.
        self.reach = min(slots or g.target_slots, g.target_slots)
        self.room = self.reach - g.prefix - g.siblings - 1
        device = verifying.slots.device
        self.chain = torch.arange(g.depth + 1, dtype=index, device=device)
        depths = [d + 1 for d, count in enumerate(siblings) for _ in range(count)]
        self.depths = torch.cat((self.chain, torch.tensor(depths, dtype=index, device=device)))
        scratch = verifying.slots[g.prefix + self.room : self.reach - 1]
        self.scratch = scratch.repeat(g.batch, 1)
        own = torch.zeros(g.depth + 1 + g.siblings, g.siblings + 1, dtype=torch.bool)
        own[g.depth + 1 :, : g.siblings] = torch.eye(g.siblings, dtype=torch.bool)
        self.own = own.to(device)
        #: How many of the image's slots behind the last known token a node sees.
        self.sees = torch.cat((self.chain, self.depths[g.depth + 1 :] - 1))

    def verify(self, state: RequestState, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run the nodes ``tokens [B, T]``; return features ``[R, T, D]`` and guided logits [B, T, V]."""
        v, g, length = self.verifying, self.geometry, state.length
        place = length.unsqueeze(1) + self.depths
        cells = place.clamp(max=g.tokens - 1)
        following = (cells + 1).clamp(max=g.tokens - 1)
        trash = self.reach - 1
        chain = place[:, : g.depth + 1]
        slots = torch.where(chain < self.room, g.prefix + chain, trash)
        reach = (length.unsqueeze(1) + self.sees + g.prefix).unsqueeze(-1)
        past = v.slots[g.prefix : g.prefix + self.room] <= reach
        nodes = place.shape[1]
        prompt = state.prefix_mask.unsqueeze(1).expand(-1, nodes, -1)
        mine = self.own.expand(len(prompt), -1, -1)
        rest = v.cache.layout.capacity - self.reach if self.reach == g.target_slots else 0
        parts = [prompt, v.branches.masked(past), mine]
        if rest:
            parts.append(flags(False, len(prompt), nodes, rest, device=mine.device))
        visible = torch.cat(parts, dim=-1)
        if v.ops.skips_blind and g.batch > 1:
            visible &= v.branches.masked(length < g.tokens - 1).view(-1, 1, 1)
        slots = torch.cat((slots, self.scratch), dim=1)
        return v.run(state, tokens, cells, following, slots, visible)
