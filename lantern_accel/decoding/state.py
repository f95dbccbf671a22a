"""Holds the static buffers of one decoding engine."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry


class RequestState:
    """What every step reads and updates in place; nothing here changes its address.

    ``condition``: what the prompt is prefilled from, one row per image and branch. ``length [B]``: the
    position of the last image token that is committed. ``tokens [B, N + 1]``: known tokens; column N is
    trash. ``uniforms`` float32 ``[B, N, columns]`` or ``keys`` int32 ``[B, 3]``: the request's
    randomness (:mod:`~.randomness`). ``histogram [B, D + 1]``: steps by accepted drafts.
    """

    def __init__(
        self, g: Geometry, condition: Tensor, index: torch.dtype, device: torch.device
    ) -> None:
        self.condition = condition
        self.length = torch.zeros(g.batch, dtype=index, device=device)
        self.tokens = self._ints(g.batch, g.tokens + 1)
        masks = g.rows if g.own_prompts else g.batch
        self.prefix_mask = torch.zeros(masks, g.prefix, dtype=torch.bool, device=device)
        self.uniforms = self._floats(g.batch, g.tokens, g.columns)
        self.keys = torch.zeros(g.batch, 3, dtype=torch.int32, device=device)
        self.step = self._ints(1)
        self.steps = self._ints(g.batch)
        self.histogram = self._ints(g.batch, g.depth + 1)
        self.price = self._floats(g.batch)
        self.last_length = self._ints(g.batch)
        self.start = self._ints(g.rows if g.own_prompts else 0)

    def _ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.length.dtype, device=self.length.device)

    def _floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.length.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in self.buffers.values())

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every buffer that a request or a step changes, by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def rewind(self, position: int, pending: int) -> None:
        """Let images be known up to ``position``, for a step there to be timed.

        ``pending``: tokens that a drafter has yet to catch up on.
        """
        self.length.fill_(position)

    def reset(self) -> None:
        """Return every buffer to zero, in place."""
        for value in self.buffers.values():
            value.zero_()


class State(RequestState):
    """The state of steps over trees: a tree's nodes lie in any slots, and a table says in which.

    The root (known, not yet run through the target) is token ``length``. ``slot_of [B, S]``: the cache
    slot that holds each image position, a permutation; positions up to ``length`` are committed, and
    the ``nodes`` after them are where the next tree is written. ``place_of [B, S]`` is its inverse.
    ``pending_*``: tokens that the drafter has yet to catch up on, ``depth + 1`` at most, with the
    target features they follow from.
    """

    def __init__(
        self,
        g: Geometry,
        condition: Tensor,
        dtype: torch.dtype,
        index: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(g, condition, index, device)
        self.root = self._ints(g.batch)
        self.pending_tokens = self._ints(g.batch, g.depth + 1)
        self.pending_count = self._ints(g.batch)
        wide = (g.taps + 1) * g.dim
        self.pending_features = self._floats(g.rows, g.depth + 1, wide, dtype=dtype)
        self.last_path = self._ints(g.batch, g.depth + 1)
        self.slot_of = self._ints(g.batch, g.image_slots)
        self.place_of = self._ints(g.batch, g.image_slots)
        self._slots = torch.arange(g.image_slots, dtype=index, device=device)
        self.reset()

    def rewind(self, position: int, pending: int) -> None:
        super().rewind(position, pending)
        self.pending_count.fill_(pending)

    def reset(self) -> None:
        """Return every buffer to zero, and every position to the slot of its own number, in place."""
        super().reset()
        self.slot_of.copy_(self._slots.expand_as(self.slot_of))
        self.place_of.copy_(self._slots.expand_as(self.place_of))


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
        self, g: Geometry, condition: Tensor, index: torch.dtype, device: torch.device
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


def state_of(
    g: Geometry,
    condition: Tensor,
    dtype: torch.dtype,
    index: torch.dtype,
    device: torch.device,
) -> State | WindowState:
    """Return the buffers of steps of these sizes; ``dtype``: the weights'."""
    if g.in_place:
        return WindowState(g, condition, index, device)
    return State(g, condition, dtype, index, device)
