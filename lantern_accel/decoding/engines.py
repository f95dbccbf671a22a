"""Makes the engine that serves a strategy, by what is registered for the source of its drafts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.decoding import selfdraft as selfdraft
from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.base import serving
from lantern_accel.decoding.step_engine import StepEngine
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.sources import AdaptiveSource
from lantern_accel.strategy.values import Sampling, Strategy


def engine_for(
    target: Any,
    drafter: Any,
    ops: TensorOps,
    strategy: Strategy,
    sampling: Sampling,
    *,
    batch: int = 1,
    neighbours: Tensor | None = None,
    copy: Any = None,
) -> EngineBase:
    """Return the engine of a strategy, whose drafts may have several lengths.

    Arguments, and what is raised, as :class:`.StepEngine` has them.
    """
    tree, shorter = strategy.drafts, []
    if isinstance(tree, AdaptiveSource) and tree.draft_lengths:
        every = [one.length for one in tree.draft_lengths]
        lengths = [length for length in every if length <= target.config.num_tokens] or every
        shorter = [tree.of_length(length) for length in lengths[:-1]]
        tree = tree.of_length(lengths[-1])
    made = serving(tree)
    kind: type[StepEngine] = made if issubclass(made, StepEngine) else Engine
    one = strategy if tree is strategy.drafts else strategy.model_copy(update={"drafts": tree})
    longest = kind(
        target, drafter, ops, one, sampling, batch=batch, neighbours=neighbours, copy=copy
    )
    if one is strategy:
        return longest
    engines = [*(longest.shorter(source) for source in shorter), longest]
    return AdaptiveEngine(dict(zip(lengths, engines, strict=True)), strategy)
