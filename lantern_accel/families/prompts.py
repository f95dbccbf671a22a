"""Prompts of token ids: side by side, right-aligned, in few lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_accel.errors import RequestError

#: Prompts are padded to multiples of this, so that few lengths need buffers and a capture of their own.
BUCKET = 64
#: Prompts that every model of text can draw, for measuring.
CAPTIONS = (
    "a red fox in the snow",
    "a bowl of ripe apricots on a wooden table",
    "an old lighthouse at dusk",
    "a steam train crossing a viaduct",
    "a portrait of a woman in a green coat",
    "a street market in the rain",
    "a glass of water with a slice of lemon",
    "a hot-air balloon above vineyards",
)


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


def check_texts(prompts: Sequence[str | int], name: str) -> list[str]:
    """Return prompts that are all text; raises :class:`RequestError` for a class id."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise RequestError(f"the model {name!r} takes text, not the class {prompt!r}")
    return [str(prompt) for prompt in prompts]
