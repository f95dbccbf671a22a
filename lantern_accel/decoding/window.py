"""Holds a window of drafts in static buffers, and runs the target over it.

Everything lies at its position in the image: a token and, while it is a draft, the distribution that it
was drawn from; keys and values. So the window moves on by a larger ``length``, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.state import RequestState
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps, flags
from lantern_accel.nn.transformer import Pass


@dataclass(frozen=True)
class WindowGeometry(Geometry):
    """Sizes of a window: ``nodes`` is what a pass runs, ``depth`` the drafts of the chain.

    ``siblings`` drafts have no slot of their own in the image, at most ``widest`` of one draft; ``kept``
    distributions are kept per image; ``passes`` whose drafts are recalled.
    """

    siblings: int = 0
    kept: int = 0
    widest: int = 0
    passes: int = 0

    @property
    def columns(self) -> int:
        """Uniforms per image and step: tests, fresh drafts, siblings drawn and tested, and draws."""
        drafts = 2 * self.depth + self.siblings + self.widest
        return 0 if self.keyed else drafts + self.depth + 1

    @property
    def image_slots(self) -> int:
        """Slots after the prompt: the image, one scratch slot per sibling, and the trash slot."""
        return self.tokens + self.siblings + 1

    @property
    def ahead(self) -> int:
        """Slots behind the known positions: the last token's, drafts', siblings' and the trash slot."""
        return self.depth + 1 + self.siblings + 1


class WindowState(RequestState):
    """The state of steps over windows: everything lies at its position of the image.

    ``length`` is the last known token, whose keys and values the next pass writes; behind it ``tokens``
    has drafts. ``newest [B]``: the last position that a pass has predicted. ``q`` float32 ``[B, K + 1,
    V]``: the distributions of positions, a ring of K and a trash row: what drafts were drawn from, or
    where noise decides what a pass gave, which fresh drafts follow. It is as wide as the vocabulary of
    *codes*: 64 positions of 16,384 codes are 4 MiB per image, as much as one pass's own distributions.
    Of the last M passes ``row_keys`` integer ``[B, M, L]`` says which position each row is of and which
    token it followed, as one number; ``row_previous`` the token before that; and what the pass gave:
    ``row_tokens``, the token that it chose, or its row ``row_probs [B, M, L, V]``.
    """

    def __init__(
        self, g: WindowGeometry, condition: Tensor, index: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(g, condition, index, device)
        self.newest = self._ints(g.batch)
        self.q = self._floats(g.batch, g.kept + 1, g.vocab) if g.kept else self._floats(0)
        held = (g.batch, g.passes, g.depth + 1) if g.passes else (0, 0, 0)
        # Half the bytes do: what is drawn from them is what they are after this rounding.
        rows = (0, 0, 0) if g.keyed else held
        self.row_probs = self._floats(*rows, g.vocab, dtype=torch.bfloat16)
        self.row_keys, self.row_previous = self._ints(*held), self._ints(*held)
        self.row_tokens = self._ints(*held) if g.keyed else self._ints(0, 0, 0)

    def rewind(self, position: int, pending: int) -> None:
        super().rewind(position, pending)
        self.newest.fill_(position)  # what is known there does not change the time


class Ring:
    """Finds the rows of :attr:`WindowState.q` that belong to positions; past the image is trash."""

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
        geometry: WindowGeometry,
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

    def logits(self, length: Tensor, start: Tensor, prefix_mask: Tensor, tokens: Tensor) -> Tensor:
        """Return guided logits ``[B, T, V]`` of what follows the nodes ``tokens [B, T]``."""
        v, g = self.verifying, self.geometry
        place = length.unsqueeze(1) + self.depths
        cells = place.clamp(max=g.tokens - 1)
        cos, sin = v.branches.image_rotary(v.target, start, cells)
        trash = self.reach - 1
        chain = place[:, : g.depth + 1]
        slots = torch.where(chain < self.room, g.prefix + chain, trash)
        reach = (length.unsqueeze(1) + self.sees + g.prefix).unsqueeze(-1)
        past = v.slots[g.prefix : g.prefix + self.room] <= reach
        nodes = place.shape[1]
        prompt = prefix_mask.unsqueeze(1).expand(-1, nodes, -1)
        mine = self.own.expand(len(prompt), -1, -1)
        rest = v.cache.layout.capacity - self.reach if self.reach == g.target_slots else 0
        parts = [prompt, v.branches.masked(past), mine]
        if rest:
            parts.append(flags(False, len(prompt), nodes, rest, device=mine.device))
        visible = torch.cat(parts, dim=-1)
        if v.ops.skips_blind and g.batch > 1:
            visible &= v.branches.masked(length < g.tokens - 1).view(-1, 1, 1)
        mask = v.ops.mask(visible.unsqueeze(1), v.target.weight.dtype)
        address = v.ops.address(v.cache, v.branches.rows(torch.cat((slots, self.scratch), dim=1)))
        at = Pass(cos, sin, v.branches.spread(mask), v.cache, address)
        features = v.target(v.target.embed_tokens(v.branches.rows(tokens)), at)
        following = (cells + 1).clamp(max=g.tokens - 1)
        return v.guidance(v.target.head(features), following)
