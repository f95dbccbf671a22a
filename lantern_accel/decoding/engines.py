"""Makes the engine that serves a strategy, by where its drafts come from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.selfdraft import SelfEngine
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.values import AdaptiveSource, Sampling, SelfDrafts, Strategy, Window


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
    """Return the engine of a strategy; ``drafter`` is left alone by strategies that need none.

    ``copy``: the target with weights in fewer bits, for strategies that draft with it.

    Raises :class:`StrategyError` as the engines do.
    """
    tree = strategy.tree
    if isinstance(tree, AdaptiveSource) and tree.draft_lengths:
        tokens = target.config.num_tokens
        every = [one.length for one in tree.draft_lengths]
        lengths = [length for length in every if length <= tokens] or every
        one = strategy.model_copy(update={"tree": tree.of_length(lengths[-1])})
        longest = engine_for(
            target, drafter, ops, one, sampling, batch=batch, neighbours=neighbours, copy=copy
        )
        engines = {length: longest.shorter(tree.of_length(length)) for length in lengths[:-1]}
        return AdaptiveEngine({**engines, lengths[-1]: longest}, strategy)
    if isinstance(tree, Window):
        return JacobiEngine(target, ops, strategy, sampling, batch=batch, neighbours=neighbours)
    if isinstance(tree, SelfDrafts):
        if copy is None:
            raise StrategyError(
                f"the strategy {strategy.name!r} drafts with a copy of the target, and none was given"
            )
        return SelfEngine(target, copy, ops, strategy, sampling, batch=batch)
    return Engine(target, drafter, ops, strategy, sampling, batch=batch, neighbours=neighbours)
