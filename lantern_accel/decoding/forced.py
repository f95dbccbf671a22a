"""Says what follows tokens that are given, by the passes that draw: teacher-forced decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.step_engine import StepEngine

#: Tokens of a pass.
TOKENS = 64


def forced_logits(engine: StepEngine, tokens: Tensor) -> Tensor:
    """Return the guided logits of every token of images, given those before: float32 ``[B, N, V]``.

    ``engine``: of plain decoding, with prompts in its buffers (:meth:`~.EngineBase.load`); ``tokens``
    integer ``[B, N]``. Passes are the engine's own, over many tokens and its cache, so that logits are
    those of its steps: to the bit where a device multiplies each row alone.
    """
    state, v, g = engine.state, engine.verifying, engine.geometry
    count = min(TOKENS, g.tokens - 1)
    found = [v.prefill(state)[1].unsqueeze(1)]
    prompt = state.prefix_mask.unsqueeze(1).expand(-1, count, -1)
    slots = v.slots[: len(v.slots) - g.prefix]
    known = 0
    while known < g.tokens - 1:
        # The last pass runs over some of the one before again: all have one shape.
        first = min(known, g.tokens - 1 - count)
        cells = v.slots[first : first + count]
        image = (slots <= cells.unsqueeze(-1)).expand(len(prompt), -1, -1)
        visible = torch.cat((prompt, image), dim=-1)
        cells = cells.expand(g.batch, -1)
        here = tokens[:, first : first + count]
        _, logits = v.run(state, here, cells, cells + 1, cells + g.prefix, visible)
        found.append(logits[:, known - first :])
        known = first + count
    return torch.cat(found, dim=1)
