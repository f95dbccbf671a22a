"""Rows that images join, of what was decided for them."""

from __future__ import annotations

from typing import Any

from lantern_accel.families.base import Conditions
from lantern_accel.generation.batch import Batch, joined_batch
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.request import ImageJob
from lantern_accel.strategy.values import Sampling, Strategy


def batch_of(
    pipeline: Pipeline, strategy: Strategy, sampling: Sampling, size: int, first: Conditions
) -> Batch[ImageJob]:
    """Return ``size`` rows; steps of auto are timed on the conditions of the first image."""
    return joined_batch(pipeline.runtime, strategy, sampling, first, size, size)[1]


def join(
    pipeline: Pipeline, batch: Batch[ImageJob], prompt: str, seed: int, index: int, **known: Any
) -> ImageJob:
    """Let the image of a prompt join, whose index is the caller's name for it."""
    image = ImageJob(index, prompt, seed, 0)
    with pipeline.backend.inference():
        made = pipeline.conditions([prompt])
        rows = pipeline.model.family.rows(pipeline.model, made, batch.sampling)
        batch.join(image, rows, **known)
    return image
