"""The static buffers of one decoding engine."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry

__all__ = ["Geometry", "State"]


class State:
    """What a step reads and updates in place; nothing here changes its address.

    ``condition``: what the prompt is prefilled from, one row per image and branch. ``length [B]``: image
    tokens whose keys and values are committed; the root (known, not yet run through the target) is
    token ``length``. ``slot_of [B, S]``: the cache slot that holds each image position, a permutation;
    positions up to ``length`` are committed, and the ``nodes`` after them are where the next tree is
    written. ``place_of [B, S]`` is its inverse. ``tokens [B, N + 1]``: known tokens; column N is trash.
    ``pending_*``: tokens that the drafter has yet to catch up on, ``depth + 1`` at most, with the target
    features they follow from. ``uniforms`` float32 ``[B, N, columns]`` or ``keys`` int32 ``[B, 3]``: the
    request's randomness (:mod:`~.randomness`). ``histogram [B, D + 1]``: steps by accepted drafts.
    """

    def __init__(
        self,
        g: Geometry,
        condition: Tensor,
        dtype: torch.dtype,
        index: torch.dtype,
        device: torch.device,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=index, device=device)

        def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.condition = condition
        self.length = ints(g.batch)
        self.root = ints(g.batch)
        self.tokens = ints(g.batch, g.tokens + 1)
        masks = g.rows if g.own_prompts else g.batch
        self.prefix_mask = torch.zeros(masks, g.prefix, dtype=torch.bool, device=device)
        self.pending_tokens = ints(g.batch, g.depth + 1)
        self.pending_count = ints(g.batch)
        self.pending_features = floats(g.rows, g.depth + 1, (g.taps + 1) * g.dim, dtype=dtype)
        self.uniforms = floats(g.batch, g.tokens, g.columns)
        self.keys = torch.zeros(g.batch, 3, dtype=torch.int32, device=device)
        self.step = ints(1)
        self.steps = ints(g.batch)
        self.histogram = ints(g.batch, g.depth + 1)
        self.price = floats(g.batch)
        self.last_path = ints(g.batch, g.depth + 1)
        self.last_length = ints(g.batch)
        self.start = ints(g.rows if g.own_prompts else 0)
        self.slot_of = ints(g.batch, g.image_slots)
        self.place_of = ints(g.batch, g.image_slots)
        self._slots = torch.arange(g.image_slots, dtype=index, device=device)
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in self.buffers.values())

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every buffer that a request or a step changes, by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def reset(self) -> None:
        """Return every buffer to zero, and every position to the slot of its own number, in place."""
        for value in self.buffers.values():
            value.zero_()
        self.slot_of.copy_(self._slots.expand_as(self.slot_of))
        self.place_of.copy_(self._slots.expand_as(self.place_of))
