"""The decoder trunk of Llama-like models, built from a description that a family fills in.

Every block is attention and a gated feed-forward, each added to what it read. What differs from one
family to the next is data: how many heads share keys and values, biases, norms of queries and keys,
and where the norms stand. Which pairs of a head turn, and by which of several positions, is in the
rotary tables (:mod:`lantern_accel.nn.rotary`). Whether a checkpoint keeps gate and up apart is its
key layout's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.transformer import Block, HeadNorms, Norms, Pass, RMSNorm


@dataclass(frozen=True)
class Decoder:
    """What tells the trunk of one Llama-like model from another's.

    ``kv_heads``: heads of keys and values, each of which serves ``heads / kv_heads`` neighbouring query
    heads. ``hidden``: width of the feed-forward. ``bias``: queries, keys and values have one.
    ``head_norm``: how queries and keys are normalised, head by head, before they are rotated.
    ``input_norm``: the first block has a norm before attention, as all others.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    eps: float
    bias: bool = False
    head_norm: HeadNorms = "none"
    norms: Norms = "before"
    input_norm: bool = True

    @classmethod
    def of(cls, sizes: Any, hidden: int = 0, **special: Any) -> Decoder:
        """Return the trunk of a network; ``special``: what tells it from a plain one.

        ``sizes``: the configuration; ``hidden``: numbers between the two matrices, 0: its ``ffn_dim``.
        """
        return cls(
            dim=sizes.dim,
            layers=sizes.n_layer,
            heads=sizes.n_head,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            hidden=hidden or sizes.ffn_dim,
            eps=sizes.norm_eps,
            **special,
        )

    @property
    def groups(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    def blocks(self) -> nn.ModuleList:
        """Build the blocks."""
        return nn.ModuleList(
            Block(
                self.dim,
                self.heads,
                self.hidden,
                self.eps,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                bias=self.bias,
                head_norm=self.head_norm,
                norms=self.norms,
                input_norm=self.input_norm or layer > 0,
            )
            for layer in range(self.layers)
        )

    def run(
        self,
        ops: TensorOps,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        norm: RMSNorm | None = None,
        taps: Sequence[int] = (),
    ) -> Tensor:
        """Run the blocks on ``x [R, T, D]`` (:meth:`TensorOps.trunk`).

        Query heads of a group become further queries of their one head: no device has to know of groups.
        """
        if self.groups > 1 and at.cache is not None:
            assert at.mask is not None
            mask = at.mask.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3)
            at = replace(at, mask=mask)
        return ops.trunk(blocks, x, at, taps, norm)
