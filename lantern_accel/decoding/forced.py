"""Runs passes over tokens that are given: teacher-forced decoding, and what a pass costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.decoding.engine import Engine

#: Tokens of a pass.
TOKENS = 64


def forced_pass(engine: Engine, first: int, count: int) -> Callable[[Tensor], Tensor]:
    """Return a pass of a plain engine over ``[B, count]`` tokens from ``first`` on, to guided logits."""
    state, v, g = engine.state, engine.verifying, engine.geometry
    prompt = state.prefix_mask.unsqueeze(1).expand(-1, count, -1)
    slots = v.slots[: len(v.slots) - g.prefix]
    cells = v.slots[first : first + count]
    image = (slots <= cells.unsqueeze(-1)).expand(len(prompt), -1, -1)
    visible = torch.cat((prompt, image), dim=-1)
    cells = cells.expand(g.batch, -1)

    def run(tokens: Tensor) -> Tensor:
        return v.run(state, tokens, cells, cells + 1, cells + g.prefix, visible)[1]

    return run


def forced_logits(engine: Engine, tokens: Tensor) -> Tensor:
    """Return the guided logits of every token of images, given those before: float32 ``[B, N, V]``.

    ``engine``: of plain decoding, with prompts in its buffers (:meth:`~.Engine.load`); ``tokens``
    integer ``[B, N]``. Logits are those of its steps, to the bit where a device multiplies each row
    alone.
    """
    total = engine.geometry.tokens
    count = min(TOKENS, total - 1)
    found = [engine.verifying.prefill(engine.state)[1].unsqueeze(1)]
    known = 0
    while known < total - 1:
        # The last pass runs over some of the one before again: all have one shape.
        first = min(known, total - 1 - count)
        logits = forced_pass(engine, first, count)(tokens[:, first : first + count])
        found.append(logits[:, known - first :])
        known = first + count
    return torch.cat(found, dim=1)
