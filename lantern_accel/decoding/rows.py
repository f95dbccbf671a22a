"""Maps images to guidance-branch rows: whether these share a prompt, and where they stand.

LlamaGen's branches share one mask, and image token ``n`` stands at grid cell ``n`` in all of them. Where
a prompt is text of the same vocabulary as the image, every row has a prompt of its own length: then masks
are a row's, and image token ``n`` of row ``r`` follows that row's last prompt token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import Filter
from lantern_accel.device.sampling import SamplingOps

REFERENCE = TensorOps()


class HasRotary(Protocol):
    """A target or drafter with rotary tables, float32 ``[positions, d/2]``."""

    rope_cos: Tensor
    rope_sin: Tensor


def prefix_positions(mask: Tensor, index: torch.dtype = torch.int64) -> Tensor:
    """Return each prompt token's position, ``[R, prefix]``: 0 at the first real one and before it."""
    return (mask.to(index).cumsum(1, dtype=index) - 1).clamp(min=0)


@dataclass(frozen=True)
class Branches:
    """How tensors of ``batch`` images become tensors of rows.

    *Images* have B entries, *rows* ``R = branches * B`` (all images of the first branch first), *masks*
    one an image where branches share the prompt, else one a row (``own``).
    """

    batch: int
    branches: int
    prefix: int
    own: bool

    @property
    def masks(self) -> int:
        """Entries of a tensor of masks."""
        return self.batch * (self.branches if self.own else 1)

    def rows(self, images: Tensor) -> Tensor:
        """Repeat a tensor of images for every branch; one image is repeated without a copy."""
        if self.branches == 1:
            return images
        if len(images) == 1:
            return images.expand(self.branches, *images.shape[1:])
        return torch.cat([images] * self.branches)

    def repeat_images(self, images: Tensor) -> Tensor:
        """Repeat a tensor of images so that it meets masks."""
        return self.rows(images) if self.own else images

    def spread(self, masks: Tensor) -> Tensor:
        """Repeat a tensor of masks for every branch."""
        return masks if self.own else self.rows(masks)

    def prompt_rotary(
        self, model: HasRotary, mask: Tensor, count: int, index: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the rotary rows of the first ``count`` prompt positions, ``[R or 1, count, 1, d/2]``."""
        if not self.own:
            shape = (1, count, 1, -1)
            return model.rope_cos[:count].view(shape), model.rope_sin[:count].view(shape)
        return _lookup(model, prefix_positions(mask[:, :count], index))

    def image_rotary(
        self, model: HasRotary, start: Tensor, cells: Tensor, back: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the rotary rows of image tokens ``cells [B, T]``, ``[R, T, 1, d/2]``.

        ``start [R]``: prompt tokens of each row, read where rows have their own. ``back``: rows that the
        model's table has fewer before the image (a drafter's has one).
        """
        if not self.own:
            cos, sin = _lookup(model, cells, self.prefix - back)
            return self.rows(cos), self.rows(sin)
        # No prompt is shorter than two tokens, but a device may run a step on zeroed buffers to warm up.
        before = (start - back).clamp(min=0).unsqueeze(1)
        return _lookup(model, self.rows(cells) + before)


def _lookup(model: HasRotary, index: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return the rows ``first + index`` of a model's tables, ``[*index.shape, 1, d/2]``."""
    shape = (*index.shape, 1, -1)
    flat = index.flatten()
    return (
        model.rope_cos[first:].index_select(0, flat).view(shape),
        model.rope_sin[first:].index_select(0, flat).view(shape),
    )


@dataclass(frozen=True)
class Allowed:
    """Which codes each image token may be: ``kind`` int ``[N]`` names a row of ``penalty`` [K, V].

    ``penalty`` is float32, 0 where a code is allowed and -inf elsewhere.
    """

    kind: Tensor
    penalty: Tensor


@dataclass(frozen=True)
class Cut:
    """Filters a head's whole rows, and leaves its first ``codes``: ids behind them are never sampled.

    What a filter keeps depends on those ids, so that they are taken out after it. ``given``: temperature,
    top-k and top-p; None filters nothing. Where it keeps no code, the likeliest one stays.
    """

    codes: int
    given: Filter | None
    ops: SamplingOps = REFERENCE

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits ``[..., codes]`` from ``[..., H]``, -inf where a code was filtered."""
        found = logits[..., : self.codes].contiguous()
        if self.given is None:
            return found
        p = self.ops.filter(logits, self.given)[..., : self.codes]
        lost = p.amax(dim=-1, keepdim=True) == 0
        kept = torch.where(lost, found == found.amax(dim=-1, keepdim=True), p > 0)
        return torch.where(kept, found, p.log())  # -inf, or NaN in a row that has one


@dataclass(frozen=True)
class Guidance:
    """From rows of logits to one distribution an image: guidance, then the codes that are allowed.

    ``scale`` float32 ``[N]``: the guidance with which token n is predicted; None without guidance.
    ``cut``: of a target whose head has more ids than codes.
    """

    scale: Tensor | None
    image_scale: Tensor | float | None
    allowed: Allowed | None
    ops: SamplingOps = REFERENCE
    cut: Cut | None = None

    @property
    def masked(self) -> bool:
        """Whether logits of -inf are codes that may not be."""
        return self.allowed is not None or self.cut is not None

    def __call__(self, logits: Tensor, token: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` from rows ``[R, T, V]``.

        ``token``: the image tokens that they are of, ``[B, T]``, or ``[B]`` where all T are of one.
        """
        penalties = None
        if self.allowed is not None:
            penalties = (self.allowed.kind, self.allowed.penalty)
        guided = self.ops.guide(logits, token, self.scale, self.image_scale, penalties)
        return guided if self.cut is None else self.cut(guided)
