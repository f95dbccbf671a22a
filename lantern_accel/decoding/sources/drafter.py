"""A drafter's passes: it catches up on what was committed, and runs its drafts level by level.

Every pass has a fixed shape. The drafter's cache holds the prompt, the image tokens, scratch slots
for the tree's inner nodes, and a trash slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, Value
from lantern_accel.decoding.sources.tree import CommittedPath, TreeDrafts, TreeState, put_first
from lantern_accel.device import plan
from lantern_accel.device.kv_cache import Pass


@dataclass(frozen=True)
class Depths:
    """What the levels of one draft share, for every depth from the root's on.

    ``rotary``: rows of the image tokens, ``[R, D + 1, 1, d/2]``; ``committed``: the device's form of the
    mask ``[M, 1, 1, base]`` of prompt and image; ``following [B, D + 1]``: the image tokens after each.
    """

    rotary: tuple[Tensor, Tensor]
    committed: Tensor
    following: Tensor


class DrafterDrafts(TreeDrafts[Value]):
    """A drafter's passes, with its cache and constants."""

    def __init__(self, given: DraftContext[Value]) -> None:
        super().__init__(given)
        assert given.drafter is not None and given.cache is not None
        self.drafter, self.target, self.cache = given.drafter, given.verifying.target, given.cache
        self.choices, self.guidance = given.session.choices, given.verifying.guidance
        self.filters, self.branches = given.session.filters, given.verifying.branches
        self._mask = given.verifying.mask
        g, self._rows = self.geometry, self.branches.rows
        self.prefix = g.prefix - 1
        device, capacity = self.target.weight.device, self.cache.layout.capacity
        self.slots = torch.arange(capacity, dtype=self.ops.index, device=device)
        self.base = self.prefix + g.tokens
        #: Slots that committed tokens lie in, by number; the others are beyond any reach.
        self.reached = torch.where(self.slots < self.base, self.slots, capacity)
        #: The scratch slots that each level behind the root's writes.
        self.written: list[Tensor] = []

    def _scratch(self, first: int, count: int) -> Tensor:
        """Return the address of ``count`` scratch slots, the same for every image."""
        place = self.slots[self.base + first : self.base + first + count]
        return self.ops.address(self.cache, place.repeat(self.geometry.rows, 1)).clone()

    def _rotary(self, state: TreeState, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary rows of image tokens ``[B, T]``, for all rows."""
        return self.branches.image_rotary(self.drafter, state.start, cells, back=1)

    def _reach(self, state: TreeState) -> Tensor:
        """Return from which slot on each is seen, ``[M, 1, capacity]``; pads from none if trained so."""
        reach, n = self.reached.expand(self.branches.masks, -1), self.prefix
        if self.drafter.config.mask_padding and n:
            prompt = torch.where(state.prefix_mask[:, :n], reach[:, :n], reach.shape[1])
            reach = torch.cat((prompt.to(reach.dtype), reach[:, n:]), dim=1)
        return reach.unsqueeze(1)

    def begin(self, state: TreeState, features: Tensor, weights: Tensor) -> None:
        """Run the prompt, and let the first token be what is caught up on next."""
        if self.prefix:
            self.prefill(state, features)
        state.pending_tokens[:, 0].copy_(state.root)
        state.pending_features[:, 0].copy_(features[:, -1])
        state.pending_count.fill_(1)

    def prefill(self, state: TreeState, features: Tensor) -> None:
        """Run the drafter over the prompt with the target's features ``[R, prefix, D]``."""
        g, slots = self.geometry, self.slots[: self.prefix]
        visible = self._reach(state) <= slots.unsqueeze(-1)
        visible = visible | (self.slots == slots.unsqueeze(-1))  # a hidden pad still sees itself
        rotary = self.branches.prompt_rotary(
            self.drafter, state.prefix_mask, self.prefix, self.ops.index
        )
        address = self.ops.address(self.cache, slots.expand(g.rows, -1))
        mask = self.branches.spread(self._mask(visible))
        at = Pass(*rotary, mask, self.cache, address)
        self.drafter.forward_prefix(state.condition, features[:, :-1], at)

    def catch_up(self, state: TreeState) -> tuple[Depths, Tensor]:
        """Run the pending tokens, and keep their keys and values.

        Returns what the draft's levels have in common, and the root's state ``[R, 1, D]``.
        """
        g, width = self.geometry, state.pending_tokens.shape[1]
        count, length = state.pending_count.unsqueeze(1), state.length.unsqueeze(1)
        cells = (length - count) + self.slots[1 : width + 1]
        trash = self.slots[:width] >= count
        place = (cells + self.prefix).masked_fill(trash, g.drafter_slots - 1)
        reach, masked = self._reach(state), self.branches.repeat_images
        visible = reach <= masked(place).unsqueeze(-1)
        rotary = self._rotary(state, cells.clamp(min=0, max=g.tokens - 1))
        address = self.ops.address(self.cache, self._rows(place))
        at = Pass(*rotary, self.branches.spread(self._mask(visible)), self.cache, address)
        out: Tensor = self.drafter(self._rows(state.pending_tokens), state.pending_features, at)
        last = self._rows((state.pending_count - 1).clamp(min=0)).view(-1, 1, 1)
        root = out.gather(1, last.expand(-1, 1, out.shape[-1]))
        cells = (length + self.slots[: g.depth + 2]).clamp(max=g.tokens - 1)
        past = reach[..., : self.base] <= masked(length + self.prefix).unsqueeze(-1)
        committed = self._mask(past)
        return Depths(self._rotary(state, cells[:, :-1]), committed, cells[:, 1:]), root

    def _level(
        self, ahead: Depths, depth: int, codes: Tensor, features: Tensor, seen: Tensor
    ) -> Tensor:
        """Run drafted nodes ``codes [B, n]`` at ``depth``; states [R, n, D].

        ``seen``: the mask of what is behind the image, ``[M, 1, n, L - base]`` in the device's form.
        """
        count = codes.shape[1]
        mask = torch.cat((ahead.committed.expand(-1, -1, count, -1), seen), dim=-1)
        cos, sin = (t[:, depth : depth + 1].expand(-1, count, -1, -1) for t in ahead.rotary)
        at = Pass(cos, sin, self.branches.spread(mask), self.cache, self.written[depth - 1])
        out: Tensor = self.drafter(self._rows(codes), features, at)
        return out

    def _guide(self, ahead: Depths, depth: int, features: Tensor) -> Tensor:
        """Return the drafter's guided logits of the tokens after ``depth``, [B, n, V]."""
        return self.guidance(self.target.all_logits(features), ahead.following[:, depth])

    def tree_buffers(self, state: TreeState) -> plan.TreeBuffers:
        """Return the buffers that are a drafter's tree's own."""
        held = state.buffers
        return plan.TreeBuffers(
            **{name: held[name] for name, _ in plan.list_buffers(plan.TreeBuffers)}
        )

    def after(self, state: TreeState, kept: CommittedPath) -> None:
        """Keep the accepted tokens and the target's features, for the next step to catch up on."""
        g, open_tokens, rows = self.geometry, kept.open.unsqueeze(1), self._rows
        tokens, pending = state.pending_tokens, state.pending_features
        put_first(tokens, torch.where(open_tokens, kept.tokens, tokens[:, : g.depth + 1]))
        index = rows(kept.path).unsqueeze(-1).expand(-1, -1, kept.features.shape[-1])
        features, old = kept.features.gather(1, index), pending[:, : g.depth + 1]
        features, old = (one.view(-1, g.batch, *one.shape[1:]) for one in (features, old))
        put_first(pending, torch.where(kept.open.view(-1, 1, 1), features, old).flatten(0, 1))
        state.pending_count.copy_(torch.where(kept.open, kept.gained, state.pending_count))
