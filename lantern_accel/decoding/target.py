"""Defines what decoding needs of a model: a target that verifies and, for trees, a drafter.

Families implement these protocols; decoding imports no family. Shapes: ``R`` rows (images x guidance
branches), ``T`` positions, ``D`` the target's width, ``V`` codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lantern_accel.decoding.rows import Allowed, HasRotary
from lantern_accel.device.kv_cache import Pass
from lantern_accel.device.plan import DraftStack, Stack


class CacheSizes(Protocol):
    """The sizes of a transformer's cache."""

    @property
    def n_layer(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class TargetSizes(CacheSizes, Protocol):
    """The sizes that fix the shapes of a step."""

    @property
    def dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def row_tokens(self) -> int: ...
    @property
    def above(self) -> Sequence[int] | None:
        """The token above each of several grids, -1 where there is none; None for one grid."""

    @property
    def prefix_length(self) -> int: ...


class DrafterSizes(CacheSizes, Protocol):
    """A drafter's sizes, and whether the prompt's pads are hidden from it."""

    @property
    def mask_padding(self) -> bool: ...


class Target(HasRotary, Protocol):
    """The model whose distribution is sampled. Its features are the states after the final norm."""

    @property
    def config(self) -> TargetSizes: ...

    @property
    def draft_head(self) -> object:
        """The :class:`~lantern_accel.nn.draft_head.DraftHead`; None where the model has none."""

    @property
    def stack(self) -> Stack | None:
        """The whole model as a fused step takes it; None where it has other parts."""

    @property
    def own_prompts(self) -> bool:
        """Whether rows of one image have prompts, and therefore positions, of their own."""

    @property
    def weight(self) -> Tensor:
        """A weight whose dtype and device are the model's."""

    def embed_tokens(self, codes: Tensor) -> Tensor:
        """Embed codes, int ``[R, T]``, as ``[R, T, D]``."""

    def embed_prefix(self, condition: Tensor) -> Tensor:
        """Embed the condition of the prompt as ``[R, prefix, D]``."""

    def condition_buffer(self, rows: int) -> Tensor:
        """Return a zeroed buffer that holds the condition of ``rows`` rows."""

    @property
    def unsampled(self) -> int:
        """Ids behind the codes that filters count and that are never sampled; mostly 0."""

    def allowed_codes(self) -> Allowed | None:
        """Return which codes each image token may be; None: any."""

    def guidance_scales(self, cfg_scale: float) -> Sequence[float] | None:
        """Return the scale with which each token is guided; None: the same for all."""

    def __call__(self, x: Tensor, at: Pass, taps: Sequence[int] = ()) -> Tensor:
        """Run all blocks and the final norm: ``[R, T, D]``, the states of ``taps`` before it."""

    def all_logits(self, features: Tensor) -> Tensor:
        """Return float32 logits ``[..., V + undrawn]`` of features ``[..., D]``, codes first."""


class Drafter(HasRotary, Protocol):
    """A model that predicts the target's next feature from its last ones and the token sampled."""

    @property
    def config(self) -> DrafterSizes: ...

    @property
    def stack(self) -> DraftStack | None: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Blocks of the target, counted from 1, whose states it reads next to the features."""

    def __call__(self, codes: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Predict features ``[R, T, D]`` from codes, int ``[R, T]``, and features."""

    def forward_prefix(self, condition: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Run the prompt with the target's features ``[R, p, D]``."""
