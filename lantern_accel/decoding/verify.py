"""Prefill and verification: the target's passes over the prompt and over a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.logits import guide
from lantern_accel.decoding.state import Geometry, State
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.models.llamagen import LlamaGenGPT
from lantern_accel.models.transformer import Pass, dense_visible
from lantern_accel.ops import KVCache, TensorOps


@dataclass
class Verifying:
    """The target of one engine, with its cache and constants.

    ``scale``: float32 ``[N]``, the guidance scale with which token n is predicted; None without
    guidance.
    """

    target: LlamaGenGPT
    ops: TensorOps
    cache: KVCache
    geometry: Geometry
    scale: Tensor | None

    def __post_init__(self) -> None:
        g = self.geometry
        device = self.target.output.weight.device
        self.slots = torch.arange(self.cache.layout.capacity, dtype=self.ops.index, device=device)
        self.base = g.prefix + g.tokens
        self.trash = g.target_slots - 1
        self.scratch = self.slots[self.base : self.base + g.nodes - 1].expand(g.batch, -1)

    def _rows(self, x: Tensor) -> Tensor:
        """Repeat a tensor of images for every guidance branch."""
        return torch.cat([x] * self.geometry.branches) if self.geometry.branches > 1 else x

    def prefill(self, state: State) -> tuple[Tensor, Tensor]:
        """Run the prompt; return features ``[R, prefix, D]`` and guided logits ``[B, V]``."""
        g = self.geometry
        x = self.target.embed_prefix(state.condition)
        seen = dense_visible(state.prefix_mask, g.prefix)
        rest = seen.new_zeros(g.batch, 1, g.prefix, self.cache.layout.capacity - g.prefix)
        mask = self.ops.mask(torch.cat((seen, rest), dim=-1), x.dtype)
        place = self.slots[: g.prefix].expand(g.rows, -1)
        cos = self.target.rope_cos[: g.prefix].view(1, g.prefix, 1, -1)
        sin = self.target.rope_sin[: g.prefix].view(1, g.prefix, 1, -1)
        at = Pass(cos, sin, self._rows(mask), self.cache, self.ops.address(self.cache, place))
        features = self.target(x, at)
        logits = self.target.head(features[:, -1:])
        if self.scale is not None:
            logits = guide(logits, self.scale[:1].expand(g.batch, 1))
        return features, logits[:, 0]

    def verify(self, state: State, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Run every node of the tree in one pass; features ``[R, T, D]`` and guided logits [B, T, V].

        The root is written to its final slot, drafted nodes to scratch slots.
        """
        g = self.geometry
        cells = (state.length.unsqueeze(1) + tree.depth).clamp(max=g.tokens - 1)
        index = (cells + g.prefix).flatten()
        shape = (*cells.shape, 1, -1)
        cos = self.target.rope_cos.index_select(0, index).view(shape)
        sin = self.target.rope_sin.index_select(0, index).view(shape)
        root_slot = (g.prefix + state.length).unsqueeze(1)
        past = self.slots[g.prefix : self.base] <= root_slot
        committed = torch.cat((state.prefix_mask, past), dim=1)
        committed = committed.unsqueeze(1).expand(-1, g.nodes, -1)
        rest = committed.new_zeros(g.batch, g.nodes, self.cache.layout.capacity - self.trash)
        visible = torch.cat((committed, tree.visible[:, :, 1:], rest), dim=-1)
        mask = self.ops.mask(visible.unsqueeze(1), self.target.output.weight.dtype)
        place = torch.cat((root_slot, self.scratch), dim=1)
        at = Pass(
            self._rows(cos),
            self._rows(sin),
            self._rows(mask),
            self.cache,
            self.ops.address(self.cache, self._rows(place)),
        )
        features = self.target(self.target.embed_tokens(self._rows(tree.tokens)), at)
        logits = self.target.head(features)
        if self.scale is not None:
            following = (cells + 1).clamp(max=g.tokens - 1)
            scale = self.scale.index_select(0, following.flatten()).view(cells.shape)
            logits = guide(logits, scale)
        return features, logits
