"""Rows that images join, of what was decided for them."""

from __future__ import annotations

from typing import Any

from lantern_accel.families.base import Conditions
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.slots import Slots
from lantern_accel.strategy.values import Sampling, Strategy


def slots_of(
    pipeline: Pipeline, strategy: Strategy, sampling: Sampling, size: int, first: Conditions
) -> Slots[Any]:
    """Return ``size`` rows; steps of auto are timed on the conditions of the first image."""
    return Slots(pipeline.runtime, strategy, sampling, first, size, size)
