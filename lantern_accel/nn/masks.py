"""Which prompt tokens see which, with pads among them."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.device.operations import flags


def dense_visible(prefix_mask: Tensor, length: int) -> Tensor:
    """Return the causal mask with hidden caption pads, bool ``[R, 1, length, length]``.

    ``prefix_mask``: bool ``[R, prefix]``. A padded position still sees itself (LlamaGen's rule).
    """
    rows, prefix = prefix_mask.shape
    index = torch.arange(length, dtype=torch.int32, device=prefix_mask.device)
    causal = index[:, None] >= index[None, :]
    after = flags(True, rows, length - prefix, device=prefix_mask.device)
    keys = torch.cat((prefix_mask, after), dim=1) if length > prefix else prefix_mask
    visible = causal & keys[:, None, :] | (index[:, None] == index[None, :])
    return visible.unsqueeze(1)


def pads_visible(prefix_mask: Tensor, visible: Tensor) -> Tensor:
    """Let padded positions of :func:`dense_visible` see all before them and the caption behind them.

    LANTERN's rule, from adding two masks. Nothing that a padded position holds reaches the target's
    tokens, but a drafter that was trained without a mask reads it.
    """
    length = visible.shape[-1]
    index = torch.arange(length, dtype=torch.int32, device=visible.device)
    causal = index[:, None] >= index[None, :]
    both = causal | prefix_mask[:, None, :]
    return torch.where(prefix_mask[:, :, None], visible[:, 0], both).unsqueeze(1)
