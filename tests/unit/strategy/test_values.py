"""Strategies: the papers' names, what is out of range, and what may be overridden."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP, validated
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57, SMALL_8
from lantern_accel.strategy.values import (
    STRATEGIES,
    TREE_STRATEGIES,
    WINDOW_STRATEGIES,
    ChainTree,
    DynamicTree,
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


@pytest.mark.parametrize(
    ("rule", "values", "field"),
    [
        (Lantern, {"delta": 0}, "delta"),
        (Lantern, {"delta": -0.1}, "delta"),
        (Lantern, {"delta": 1.5}, "delta"),
        (Lantern, {"delta": float("nan")}, "delta"),
        (Lantern, {"k": 0}, "k"),
        (Lantern, {"lam": 2}, "lam"),
        (LanternPP, {"lam": 0.5}, "lam"),
        (LanternPP, {"lam": float("nan")}, "lam"),
        (LanternPP, {"k": 0}, "k"),
        (LanternPP, {"delta": 0.1}, "delta"),
        (ChainTree, {"length": 0}, "length"),
        (DynamicTree, {"top_k": 0}, "top_k"),
        (DynamicTree, {"depth": -1}, "depth"),
        (DynamicTree, {"total": 1}, "total"),
        (Sampling, {"temperature": -1}, "temperature"),
        (Sampling, {"top_p": 0}, "top_p"),
        (Sampling, {"top_p": 1.1}, "top_p"),
        (Sampling, {"top_k": -1}, "top_k"),
        (Sampling, {"cfg_scale": -1}, "cfg_scale"),
        (Sampling, {"cfg_interval": -2}, "cfg_interval"),
        (Sampling, {"order": "random"}, "order"),
        (Strategy, {"residual": "best"}, "residual"),
    ],
)
def test_values_out_of_range_are_refused(rule: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        rule(**values)
    with pytest.raises(StrategyError, match=r"what: .*" + ("lambda" if field == "lam" else field)):
        validated(rule, values, "what")


@pytest.mark.parametrize(
    ("rule", "values"),
    [(Lantern, {"delta": 1.0, "k": 1}), (LanternPP, {"lam": 1.0}), (Sampling, {"temperature": 0})],
)
def test_the_ends_of_the_ranges_are_allowed(rule: Any, values: dict[str, Any]) -> None:
    assert rule(**values).model_dump().items() >= values.items()


def test_relaxation_without_a_tree_is_refused() -> None:
    with pytest.raises(ValidationError, match="drafts nothing that could be relaxed"):
        Strategy(drafts=NoTree(), acceptance=Lantern())


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle", {"delta": 0.1}, "'eagle' has no delta: its acceptance rule is 'exact'"),
        ("lantern", {"lam": 2.0}, "'lantern' has no lambda.*leave lambda out"),
        ("lantern++", {"delta": 0.1}, r"'lantern\+\+' has no delta"),
        ("vanilla", {"k": 3}, "'vanilla' has no k"),
        ("lantern", {"kind": "exact"}, "has no kind"),
        ("lantern", {"delta": 0}, r"delta .*above 0.*not 0"),
        ("lantern", {"delta": 1.5}, r"delta .*1 or less.*not 1\.5"),
        ("lantern++", {"lam": 0.5}, r"lambda .*1 or more.*not 0\.5"),
        ("lantern", {"k": 0}, r"k .*1 or more.*not 0"),
        ("lantern", {"residual": "none"}, r"residual must be 'aggregate'.*not 'none'"),
        ("lantern", {"drafts": NoTree()}, "drafts nothing that could be relaxed"),
    ],
)
def test_override_refuses_with_one_sentence(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StrategyError, match=message) as caught:
        named(name).override(**changes)
    assert "\n" not in str(caught.value)


def test_what_a_value_is_called_stands_once_in_its_refusal() -> None:
    exact = Strategy(name="eagle", drafts=SMALL_8)
    for changes, says in (
        ({"tv_budget": 0.1}, "strategy: exact acceptance uses no total variation"),
        ({"tv_budget": 2}, "strategy: tv_budget must be below 1"),
    ):
        with pytest.raises(StrategyError) as caught:
            exact.override(**changes)
        assert str(caught.value).startswith(says)


def test_sampling_knows_greedy_and_guided() -> None:
    assert Sampling(temperature=0).greedy and not Sampling().greedy
    assert Sampling(cfg_scale=1.5).guided and not Sampling(cfg_scale=1.0).guided
