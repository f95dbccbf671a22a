"""Strategies: the papers' names, what is out of range, and what may be overridden."""

from __future__ import annotations

import pytest

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57, SMALL_8
from lantern_accel.strategy.values import (
    STRATEGIES,
    TREE_STRATEGIES,
    WINDOW_STRATEGIES,
    ChainTree,
    NoTree,
    Sampling,
    Strategy,
    Window,
    named_strategy,
)


def named(name: str) -> Strategy:
    return named_strategy(name, static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)


def test_names_are_the_papers_combinations() -> None:
    points = {name: (named(name).drafts, named(name).acceptance) for name in STRATEGIES}
    assert {name: points[name] for name in TREE_STRATEGIES} == {
        "vanilla": (NoTree(), Exact()),
        "eagle": (NAIVE_EXTEND_57, Exact()),
        "eagle2": (EAGLE2_TREE, Exact()),
        "lantern": (EAGLE2_TREE, Lantern()),
        "lantern++": (NAIVE_EXTEND_57, LanternPP()),
    }
    windows = {name: points[name] for name in WINDOW_STRATEGIES}
    assert windows["scd"] == (Window(), Exact())
    assert all(isinstance(tree, Window) for tree, _ in windows.values())
    assert all(rule == Exact() for _, rule in windows.values())
    assert {named(name).residual for name in STRATEGIES} == {"aggregate"}
    assert [named(name).name for name in STRATEGIES] == list(STRATEGIES)


def test_a_models_own_defaults_are_used() -> None:
    own = named_strategy(
        "lantern++",
        static=SMALL_8,
        dynamic=EAGLE2_TREE,
        lantern=Lantern(k=3),
        lantern_pp=LanternPP(k=5, lam=3),
    )
    assert own.drafts == SMALL_8 and own.acceptance == LanternPP(k=5, lam=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latern", r"unknown strategy 'latern'; did you mean .*lantern"),
        ("Eagle-2", r"did you mean eagle2"),
        ("lantern+", r"did you mean lantern"),
        ("zzz", r"known: auto, eagle, eagle2, lantern, .*scd.*vanilla"),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        named(name)


def test_neighbour_columns_that_a_strategy_reads() -> None:
    assert named("eagle").neighbours == 0
    assert named("lantern").override(k=7).neighbours == 7
    assert named("lantern").override(k=7, residual="official").neighbours == 8
    assert named("lantern++").override(k=7, residual="optimal").neighbours == 7


def test_override_changes_what_is_said_and_nothing_else() -> None:
    base = named("lantern")
    assert base.override() == base
    assert base.override(k=None, delta=None, drafts=None) == base
    changed = base.override(delta=0.4, drafts=ChainTree(length=2), residual="optimal")
    assert changed.acceptance == Lantern(delta=0.4)
    assert (changed.drafts, changed.residual) == (ChainTree(length=2), "optimal")
    assert base == named("lantern"), "the original stays"
    assert named("lantern++").override(lam=3.0, k=4).acceptance == LanternPP(k=4, lam=3.0)


def test_sampling_knows_greedy_and_guided() -> None:
    assert Sampling(temperature=0).greedy and not Sampling().greedy
    assert Sampling(cfg_scale=1.5).guided and not Sampling(cfg_scale=1.0).guided
