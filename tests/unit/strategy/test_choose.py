"""From a name to a strategy: the window that a batch has where nobody chose its length."""

from __future__ import annotations

import pytest

from lantern_accel.strategy.choose import SHORTEST, shortened
from lantern_accel.strategy.values import (
    WINDOW_STRATEGIES,
    DynamicTree,
    StaticTree,
    Strategy,
    Window,
    named_strategy,
)

STATIC = StaticTree(paths=((0,), (0, 0)))


def named(name: str) -> Strategy:
    return named_strategy(name, static=STATIC, dynamic=DynamicTree())


def length(strategy: Strategy) -> int:
    assert isinstance(strategy.tree, Window)
    return strategy.tree.length


@pytest.mark.parametrize("name", WINDOW_STRATEGIES)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 16, 100])
@pytest.mark.parametrize("positions", [16, 32])
def test_a_batch_s_windows_have_few_positions_in_all(name: str, batch: int, positions: int) -> None:
    found = length(shortened(named(name), batch, positions))
    assert SHORTEST <= found <= length(named(name))
    assert found * batch <= positions or found == SHORTEST


def test_one_and_two_images_keep_the_usual_window() -> None:
    found = [length(shortened(named("scd"), batch, 32)) for batch in (1, 2, 4, 8)]
    assert found == [16, 16, 8, 4]


@pytest.mark.parametrize("name", ["vanilla", "eagle", "lantern++", "auto"])
def test_other_strategies_stay_as_they_are(name: str) -> None:
    assert shortened(named(name), 16, 32) == named(name)


def test_a_shorter_window_stays() -> None:
    short = named("scd").override(window=3)
    assert shortened(short, 16, 32) == short
