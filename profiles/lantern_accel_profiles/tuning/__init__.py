"""Finds what is fastest on a device by measurement: a strategy's tree, and the drafts of auto."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.strategy.values import Strategy
    from lantern_accel_profiles.tuning.auto import AutoTuner
    from lantern_accel_profiles.tuning.trees import TreeTuner


def search_for(pipeline: Pipeline, strategy: Strategy, **given: Any) -> AutoTuner | TreeTuner:
    """Return the search for a strategy's drafts; ``given`` as :class:`.Search` takes it.

    Raises :class:`.StrategyError` where there is nothing to tune.
    """
    from lantern_accel.errors import StrategyError
    from lantern_accel.strategy.values import AUTO
    from lantern_accel_profiles.tuning.auto import AutoTuner
    from lantern_accel_profiles.tuning.trees import TreeTuner

    if strategy.name == AUTO:
        return AutoTuner(pipeline, strategy, **given)
    if strategy.drafts.device_sets == "tree":
        return TreeTuner(pipeline, strategy, **given)
    raise StrategyError(
        f"the strategy {strategy.name!r} has no static tree to tune; choose auto, which finds the best "
        "windows too, or eagle or lantern++"
    )
