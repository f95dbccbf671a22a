"""Runs passes over tokens that are given: teacher-forced decoding, and what a pass costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.logits import distribution

#: Tokens of a pass.
TOKENS = 64


def forced_pass(
    engine: Engine, first: int, count: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a pass over ``[B, count]`` tokens from ``first`` on, to features and guided logits.

    Every token before lies in the slot of its own number, as in plain decoding.
    """
    state, v, g = engine.state, engine.verifying, engine.geometry
    slots = v.slots[: len(v.slots) - g.prefix]
    cells = v.slots[first : first + count]
    image = (slots <= cells.unsqueeze(-1)).expand(len(state.prefix_mask), -1, -1)
    mask = v.mask_of(state.prefix_mask, image, 0)
    cells = cells.expand(g.batch, -1)

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return v.run(state, tokens, cells, cells + 1, cells + g.prefix, mask)

    return run


def forced_logits(engine: Engine, tokens: Tensor) -> Tensor:
    """Return the guided logits of every token of images, given those before: float32 ``[B, N, V]``.

    ``engine``: of plain decoding, with prompts in its buffers (:meth:`~.Engine.load`); ``tokens``
    integer ``[B, N]``. The result equals its steps' logits, to the bit where a device multiplies each
    row alone.
    """
    total = engine.geometry.tokens
    count = min(TOKENS, total - 1)
    found = [engine.verifying.prefill(engine.state)[1].unsqueeze(1)]
    known = 0
    while known < total - 1:
        # The last pass runs over some of the one before again: all have one shape.
        first = min(known, total - 1 - count)
        _, logits = forced_pass(engine, first, count)(tokens[:, first : first + count])
        found.append(logits[:, known - first :])
        known = first + count
    return torch.cat(found, dim=1)


def resume(engine: Engine, tokens: Tensor) -> None:
    """Let the images of an engine go on behind ``tokens``, integer ``[B, n]``; n is 1 or more.

    Call it after :meth:`~.Engine.start`. The engine then chooses the tokens that it would have
    chosen, where the seed decides every token and no drafter has read those before.
    """
    state, count = engine.state, tokens.shape[1] - 1
    given = tokens.to(state.tokens.device, state.tokens.dtype)
    state.tokens[:, : count + 1].copy_(given)
    state.length.clamp_(min=count)  # what only fills the batch stays complete
    if not 0 < count < engine.geometry.tokens - 1:
        return
    for first in range(0, count, TOKENS):
        part = given[:, first : min(first + TOKENS, count)]
        features, logits = forced_pass(engine, first, part.shape[1])(part)
    if "root" in state.buffers:
        state.buffers["root"].copy_(given[:, -1])
    else:
        state.buffers["newest"].copy_(state.length)
    weights = logits[:, -1]
    if not engine.greedy:
        weights = distribution(weights, engine.session.filters)
    engine.source.begin(state, features, weights)
