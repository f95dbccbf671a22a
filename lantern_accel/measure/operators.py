"""Counts the operators that a step launches where nothing is fused, on shapes alone.

A device's own count says what *it* gives to its queue: a native call or a fused kernel hides in one, or
in none, what is many on another device. Projections take the count that is made here, the same
everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from lantern_accel.decoding.engines import engine_for
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.random_weights import random_model
from lantern_accel.measure.phases import count_launches
from lantern_accel.strategy.values import Sampling, Strategy


class Shapes(TensorOps):
    """The reference operations on tensors that have shapes and no memory."""

    device = torch.device("meta")


@torch.inference_mode()
def count_operators(
    manifest: Any,
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
    dtype: torch.dtype,
    *,
    prefill: bool = True,
) -> dict[str, int]:
    """Return the reference's operators by phase (views left out) of a model with these sizes."""
    ops = Shapes()
    with torch.device("meta"):
        model = random_model(manifest, ops, dtype, neighbours=max(strategy.neighbours, 1))
        engine = engine_for(
            model.target,
            model.drafter,
            ops,
            strategy,
            sampling,
            batch=batch,
            neighbours=model.neighbours,
            copy=model.target,
        )
        return count_launches(engine, prefill=prefill)
