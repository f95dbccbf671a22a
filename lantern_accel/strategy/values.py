"""The strategies that have names, and the values that they are made of.

``vanilla``, ``eagle``, ``eagle2``, ``lantern`` and ``lantern++`` are the papers' combinations:
EAGLE arXiv 2401.15077, EAGLE-2 2406.16858, LANTERN 2410.03355, LANTERN++ 2502.06352. ``sjd`` (arXiv
2410.01699) and ``scd`` (2510.24211) draft in a window, without a drafter.
"""

from __future__ import annotations

from lantern_accel.errors import StrategyError, did_you_mean
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP, validate_model
from lantern_accel.strategy.sampling import Sampling as Sampling
from lantern_accel.strategy.sources import ChainTree as ChainTree
from lantern_accel.strategy.sources import DynamicTree as DynamicTree
from lantern_accel.strategy.sources import NoTree as NoTree
from lantern_accel.strategy.sources import SelfDrafts as SelfDrafts
from lantern_accel.strategy.sources import StaticTree as StaticTree
from lantern_accel.strategy.sources import Window as Window
from lantern_accel.strategy.sources import named_sources, source_class
from lantern_accel.strategy.sources import with_tokens_per_step as with_tokens_per_step
from lantern_accel.strategy.strategy import AUTO as AUTO
from lantern_accel.strategy.strategy import NO_DRAFTER as NO_DRAFTER
from lantern_accel.strategy.strategy import SELF as SELF
from lantern_accel.strategy.strategy import WINDOW_STRATEGIES as WINDOW_STRATEGIES
from lantern_accel.strategy.strategy import Coupling as Coupling
from lantern_accel.strategy.strategy import NeighbourSpace as NeighbourSpace
from lantern_accel.strategy.strategy import Residual as Residual
from lantern_accel.strategy.strategy import Strategy as Strategy

#: Lengths of auto's window, few since a longer one takes some steps to settle.
AUTO_LENGTHS = (1, 2, 4, 8, 16)
#: Lengths of auto's drafts by a copy of the target's own weights, those drafts and one.
AUTO_SELF = (1, 2, 3, 5, 7, 9)
#: Lengths of auto's chains of a drafter's drafts, those drafts and one.
AUTO_CHAIN = (1, 2, 4, 6)
#: Strategies whose drafts are a drafter's, and plain decoding.
TREE_STRATEGIES = ("vanilla", "eagle", "eagle2", "lantern", "lantern++")
STRATEGIES = (*TREE_STRATEGIES, *WINDOW_STRATEGIES, SELF)


def named_strategy(
    name: str,
    *,
    static: StaticTree,
    dynamic: DynamicTree,
    lantern: Lantern | None = None,
    lantern_pp: LanternPP | None = None,
) -> Strategy:
    """Return the strategy called ``name`` over the given trees; unknown names raise with the nearest."""
    points: dict[str, tuple[object, object]] = {
        AUTO: (Window.over(AUTO_LENGTHS), Exact()),
        "vanilla": (NoTree(), Exact()),
        "eagle": (static, Exact()),
        "eagle2": (dynamic, Exact()),
        "lantern": (dynamic, lantern or Lantern()),
        "lantern++": (static, lantern_pp or LanternPP()),
        "sjd": (Window(fresh="uniform"), Exact()),
        "scd": (Window(), Exact()),
        SELF: (SelfDrafts(), Exact()),
    }
    if name not in points:
        source = source_class(name)
        if source is None or not source.by_name:
            known = [*points, *named_sources()]
            text = f"unknown strategy {name!r}{did_you_mean(name, known)}"
            raise StrategyError(text, field="strategy")
        return Strategy(name=name, drafts=validate_model(source, {}, name))
    tree, acceptance = points[name]
    return Strategy(name=name, drafts=tree, acceptance=acceptance)
