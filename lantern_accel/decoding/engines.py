"""One call for every engine: which one serves a strategy depends on where its drafts come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lantern_accel.decoding.adaptive_chain import AdaptiveChain
from lantern_accel.decoding.adaptive_self import AdaptiveSelf
from lantern_accel.decoding.adaptive_window import AdaptiveWindow
from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.selfdraft import SelfEngine
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.values import (
    ChainTree,
    DraftSource,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)


@dataclass(frozen=True)
class Asked:
    """What an engine is made of; ``drafter`` and ``copy`` are None where there are none."""

    target: Target
    drafter: Drafter | None
    ops: TensorOps
    strategy: Strategy
    sampling: Sampling
    batch: int = 1
    neighbours: Tensor | None = None
    copy: Target | None = None


def _tree(a: Asked) -> EngineBase:
    return Engine(
        a.target, a.drafter, a.ops, a.strategy, a.sampling, batch=a.batch, neighbours=a.neighbours
    )


def _chain(a: Asked) -> EngineBase:
    if not (isinstance(a.strategy.tree, ChainTree) and a.strategy.tree.draft_lengths):
        return _tree(a)
    return AdaptiveChain(
        a.target, a.drafter, a.ops, a.strategy, a.sampling, batch=a.batch, neighbours=a.neighbours
    )


def _window(a: Asked) -> EngineBase:
    assert isinstance(a.strategy.tree, Window)
    made = AdaptiveWindow if a.strategy.tree.draft_lengths else JacobiEngine
    return made(a.target, a.ops, a.strategy, a.sampling, batch=a.batch, neighbours=a.neighbours)


def _self(a: Asked) -> EngineBase:
    if a.copy is None:
        raise StrategyError(
            f"the strategy {a.strategy.name!r} drafts with a copy of the target, and none was given"
        )
    assert isinstance(a.strategy.tree, SelfDrafts)
    made = AdaptiveSelf if a.strategy.tree.draft_lengths else SelfEngine
    return made(a.target, a.copy, a.ops, a.strategy, a.sampling, batch=a.batch)


#: Sources whose steps keep a state of their own; any other is a tree's (:mod:`~.sources`).
ENGINES: dict[type[DraftSource], Callable[[Asked], EngineBase]] = {
    ChainTree: _chain,
    Window: _window,
    SelfDrafts: _self,
}


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
    asked = Asked(target, drafter, ops, strategy, sampling, batch, neighbours, copy)
    return ENGINES.get(type(strategy.tree), _tree)(asked)
