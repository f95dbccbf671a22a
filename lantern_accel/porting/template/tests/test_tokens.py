"""Greedy decoding in float32 gives the CPU's tokens."""

from __future__ import annotations

import torch

import lantern_accel


def test_the_tokens_are_the_cpu_s() -> None:
    ours, reference = (
        lantern_accel.generate(
            "red heart", device=device, dtype="float32", strategy="vanilla", temperature=0
        ).tokens
        for device in ("abacus", "cpu")
    )
    assert torch.equal(ours, reference)
