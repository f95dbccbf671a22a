"""One call for every engine: which one serves a strategy depends on where its drafts come from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.decoding.chained import ChainedEngine
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.paced import PacedEngine
from lantern_accel.decoding.running import Running
from lantern_accel.decoding.selfdraft import SelfEngine
from lantern_accel.decoding.selfpaced import SelfPacedEngine
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.values import ChainTree, Sampling, SelfDrafts, Strategy, Window


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
) -> Running:
    """Return the engine of a strategy; ``drafter`` is left alone by strategies that need none.

    ``copy``: the target with weights in fewer bits, for strategies that draft with it.

    Raises :class:`StrategyError` as the engines do.
    """
    if isinstance(strategy.tree, SelfDrafts):
        if copy is None:
            raise StrategyError(
                f"the strategy {strategy.name!r} drafts with a copy of the target, and none was given"
            )
        if strategy.tree.paces:
            return SelfPacedEngine(target, copy, ops, strategy, sampling, batch=batch)
        return SelfEngine(target, copy, ops, strategy, sampling, batch=batch)
    if isinstance(strategy.tree, ChainTree) and strategy.tree.paces:
        return ChainedEngine(
            target, drafter, ops, strategy, sampling, batch=batch, neighbours=neighbours
        )
    if isinstance(strategy.tree, Window) and strategy.tree.paces:
        return PacedEngine(target, ops, strategy, sampling, batch=batch, neighbours=neighbours)
    if isinstance(strategy.tree, Window):
        return JacobiEngine(target, ops, strategy, sampling, batch=batch, neighbours=neighbours)
    return Engine(target, drafter, ops, strategy, sampling, batch=batch, neighbours=neighbours)
