"""Greedy decoding in float32 gives the CPU's logits and tokens."""

from __future__ import annotations

import lantern_accel
from lantern_accel.device import Backend
from lantern_accel.testing import check_tokens, next_to_cpu


def test_the_logits_of_a_tiny_model_are_the_cpu_s(backend: Backend) -> None:
    next_to_cpu(backend)  # raises with the first step whose logits are off


def test_the_tokens_are_the_cpu_s() -> None:
    ours, reference = (
        lantern_accel.generate(
            "red heart", device=device, dtype="float32", strategy="vanilla", temperature=0
        ).tokens
        for device in ("abacus", "cpu")
    )
    check_tokens(ours, reference)  # raises with the first token that differs
