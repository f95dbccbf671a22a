"""Prompts of token ids: side by side, right-aligned, in few lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_accel.errors import RequestError

#: Prompts are padded to multiples of this, so that few lengths need buffers and a capture of their own.
BUCKET = 64


def bucket(length: int, size: int = BUCKET) -> int:
    """Return the prompt length that buffers are made for: the next multiple of ``size``."""
    return -(-length // size) * size


def left_pad(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[Tensor, Tensor]:
    """Right-align prompts in ``length`` positions: ids int64 ``[R, length]``, mask bool of tokens."""
    longest = max(len(row) for row in rows)
    if longest > length:
        raise RequestError(
            f"a prompt has {longest} tokens, the buffers hold {length}; shorten the prompt"
        )
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    start = torch.tensor([length - len(row) for row in rows])
    return ids, torch.arange(length) >= start.unsqueeze(1)
