"""Finds what is fastest on a device by measurement: trees, windows, and the drafts of auto."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.strategy.values import Strategy
    from lantern_accel.tuning.search import Search


def search_for(pipeline: Pipeline, strategy: Strategy, **given: Any) -> Search[Any]:
    """Return the search for a strategy's drafts; ``given`` as :class:`.Search` takes it.

    Raises :class:`.StrategyError` where there is nothing to tune.
    """
    from lantern_accel.errors import StrategyError
    from lantern_accel.strategy.values import AUTO, StaticTree, Window
    from lantern_accel.tuning.auto import AutoTuner
    from lantern_accel.tuning.trees import TreeTuner
    from lantern_accel.tuning.windows import WindowTuner

    if strategy.name == AUTO:
        return AutoTuner(pipeline, strategy, **given)
    if isinstance(strategy.drafts, Window):
        return WindowTuner(pipeline, strategy, **given)
    if isinstance(strategy.drafts, StaticTree):
        return TreeTuner(pipeline, strategy, **given)
    raise StrategyError(
        f"{strategy.name} has no static tree and no window to tune; choose auto, eagle, lantern++ or scd"
    )
