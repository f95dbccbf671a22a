"""The static buffers of one decoding engine, and the sizes that fix their shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Every size that a step's shapes depend on; host integers, fixed for an engine's life.

    ``batch`` images; ``branches`` 2 with guidance (rows ``[cond; uncond]``), else 1; ``prefix`` and
    ``tokens`` positions of prompt and image; ``nodes`` of the tree with its root; ``depth`` of its
    deepest draft; ``scratch`` drafter nodes a step; ``vocab`` codes; ``dim`` width of a feature;
    ``own_prompts``: rows of one image have prompts of their own (see :class:`Branches`); ``taps``: states
    of the target that the drafter reads beside the feature.
    """

    batch: int
    branches: int
    prefix: int
    tokens: int
    nodes: int
    depth: int
    scratch: int
    vocab: int
    dim: int
    own_prompts: bool = False
    taps: int = 0

    @property
    def rows(self) -> int:
        return self.batch * self.branches

    @property
    def target_slots(self) -> int:
        """Prompt, image, one scratch slot a drafted node, and the trash slot (the last)."""
        return self.prefix + self.tokens + self.nodes - 1 + 1

    @property
    def drafter_slots(self) -> int:
        """As for the target; the drafter's prefix is one position shorter."""
        return self.prefix - 1 + self.tokens + self.scratch + 1


class State:
    """What a step reads and updates in place; nothing here changes its address.

    ``condition``: what the prompt is prefilled from, a row an image and branch. ``length [B]``: image
    tokens whose keys and values are committed; the root (known, not yet run through the target) is
    token ``length``. ``tokens [B, N + 1]``: known tokens; column N is trash. ``pending_*``: tokens that
    the drafter has yet to catch up on, ``depth + 1`` at most, with the target features they follow
    from. ``histogram [B, D + 1]``: steps by accepted drafts.
    """

    def __init__(
        self,
        g: Geometry,
        columns: int,
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
        self.uniforms = floats(g.batch, g.tokens, columns)
        self.step = ints(1)
        self.steps = ints(g.batch)
        self.histogram = ints(g.batch, g.depth + 1)
        self.moved = floats(g.batch)
        self.last_path = ints(g.batch, g.depth + 1)
        self.last_length = ints(g.batch)
        self.start = ints(g.rows if g.own_prompts else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        tensors: list[Tensor] = list(vars(self).values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def reset(self) -> None:
        """Return every buffer to zero, in place."""
        for value in vars(self).values():
            value.zero_()
