"""One call for every engine: which one serves a strategy depends on where its drafts come from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.decoding.chained import ChainedEngine
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.paced import PacedEngine
from lantern_accel.decoding.running import Running
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import ChainTree, Sampling, Strategy, Window


def engine_for(
    target: Any,
    drafter: Any,
    ops: TensorOps,
    strategy: Strategy,
    sampling: Sampling,
    *,
    batch: int = 1,
    neighbours: Tensor | None = None,
) -> Running:
    """Return the engine of a strategy; ``drafter`` is left alone by strategies that need none.

    Raises :class:`StrategyError` as the engines do.
    """
    if isinstance(strategy.tree, ChainTree) and strategy.tree.paces:
        return ChainedEngine(
            target, drafter, ops, strategy, sampling, batch=batch, neighbours=neighbours
        )
    if isinstance(strategy.tree, Window) and strategy.tree.paces:
        return PacedEngine(target, ops, strategy, sampling, batch=batch, neighbours=neighbours)
    if isinstance(strategy.tree, Window):
        return JacobiEngine(target, ops, strategy, sampling, batch=batch, neighbours=neighbours)
    return Engine(target, drafter, ops, strategy, sampling, batch=batch, neighbours=neighbours)
