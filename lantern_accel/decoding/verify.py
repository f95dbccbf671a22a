"""Runs the target: prefill over the prompt, and a pass over the nodes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.rows import Branches, Guidance
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Target
from lantern_accel.device.kv_cache import KVCache, Pass
from lantern_accel.device.operations import TensorOps, flags
from lantern_accel.nn.masks import dense_visible, pads_visible


@dataclass
class TargetRunner:
    """The target of one engine, with its cache and constants.

    ``guidance`` makes one distribution of an image's rows. ``taps``: blocks whose states the drafter
    reads, which come before the features: ``D`` is then that many times wider. ``open_pads``: caption
    pads hold what LANTERN's code gives them, for a drafter that reads them.
    """

    target: Target
    ops: TensorOps
    cache: KVCache
    geometry: Geometry
    guidance: Guidance
    taps: Sequence[int] = ()
    open_pads: bool = False

    def __post_init__(self) -> None:
        g = self.geometry
        device = self.target.weight.device
        self.slots = torch.arange(self.cache.layout.capacity, dtype=self.ops.index, device=device)
        self.branches = Branches(g.batch, g.branches, g.prefix, g.own_prompts)
        self._rows = self.branches.rows
        dark = flags(False, self.branches.masks, 1, len(self.slots), device=device)
        self._hidden = self.mask(dark).clone()
        self.first = torch.zeros(g.batch, dtype=self.ops.index, device=device)

    def mask(self, visible: Tensor) -> Tensor:
        """Return the device's form of a mask, ``[M, 1, T, n]`` from bool ``[M, T, n]``."""
        return self.ops.mask(visible.unsqueeze(1), self.target.weight.dtype)

    def mask_of(self, prompt: Tensor, image: Tensor, hidden: int) -> Tensor:
        """Join the device's form ``[M, 1, T, P + n + hidden]`` of what nodes see; none of booleans.

        ``prompt`` bool ``[M, P]``; ``image`` bool ``[M, T, n]``; ``hidden``: slots behind that none sees.
        """
        count = image.shape[1]
        parts = [self.mask(prompt.unsqueeze(1)).expand(-1, -1, count, -1), self.mask(image)]
        if hidden:
            parts.append(self._hidden[..., :hidden].expand(-1, -1, count, -1))
        return torch.cat(parts, dim=-1)

    def _states(self, x: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """Run the target; return what the drafter reads, and the features that the head reads."""
        if not self.taps:
            features = self.target(x, at)
            return features, features
        states = self.target(x, at, self.taps)
        return states, states[..., -self.geometry.dim :]

    def prefill(self, state: State) -> tuple[Tensor, Tensor]:
        """Run the prompt; return features ``[R, prefix, D]`` and guided logits ``[B, V]``."""
        g = self.geometry
        x = self.target.embed_prefix(state.condition)
        seen = dense_visible(state.prefix_mask, g.prefix)
        if self.open_pads:
            seen = pads_visible(state.prefix_mask, seen)
        hidden = self._hidden[..., g.prefix :].expand(-1, -1, g.prefix, -1)
        mask = torch.cat((self.mask(seen.squeeze(1)), hidden), dim=-1)
        place = self.slots[: g.prefix].expand(g.rows, -1)
        cos, sin = self.branches.prompt_rotary(
            self.target, state.prefix_mask, g.prefix, self.ops.index
        )
        mask = self.branches.spread(mask)
        at = Pass(cos, sin, mask, self.cache, self.ops.address(self.cache, place))
        states, features = self._states(x, at)
        logits = self.guidance(self.target.all_logits(features[:, -1:]), self.first)
        return states, logits[:, 0]

    def run(
        self,
        state: State,
        tokens: Tensor,
        cells: Tensor,
        following: Tensor,
        slots: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run nodes ``tokens [B, T]`` in one pass; features ``[R, T, D]`` and guided logits [B, T, V].

        ``cells [B, T]``: which image tokens they are, and ``following`` those after them; ``slots [B,
        T]``: where in the cache they are written; ``mask``: what each sees of the first n slots, in the
        device's form ``[M, 1, T, n]``.
        """
        cos, sin = self.branches.image_rotary(self.target, state.start, cells)
        address = self.ops.address(self.cache, self._rows(slots))
        at = Pass(cos, sin, self.branches.spread(mask), self.cache, address)
        states, features = self._states(self.target.embed_tokens(self._rows(tokens)), at)
        return states, self.guidance(self.target.all_logits(features), following)
