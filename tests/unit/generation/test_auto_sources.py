"""Tests of what auto chooses among sources that were timed."""

from __future__ import annotations

import pytest

from lantern_accel.generation.timed import (
    DRAFTER_STEPS,
    FEWEST_IMAGES,
    PRIOR_IMAGES,
    Timed,
)
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Strategy, Window


def timed(cost: float, brings: float, plain: float | None) -> Timed:
    """Return a window of four whose costs are relative to a plain step of ``plain`` ms."""
    lengths = (
        DraftLength(length=1, cost=1.0, tokens_per_step=1.0),
        DraftLength(length=4, cost=cost, tokens_per_step=brings),
    )
    return Timed(strategy=Strategy(tree=Window(length=4, draft_lengths=lengths)), plain=plain)


def test_sources_are_compared_by_the_least_plain_step() -> None:
    beside_slow_steps = timed(1.2, 2.4, 5.0)  # 6 ms: it looks twice as fast as plain decoding
    beside_fast_ones = timed(1.4, 2.4, 4.0)  # 5.6 ms
    assert beside_slow_steps.promise(1) > beside_fast_ones.promise(1)
    one = beside_slow_steps.relative_to(4.0)
    assert one.promise(1) < beside_fast_ones.promise(1)
    assert [length.cost for length in one.draft_lengths] == [1.0, 1.5]
    assert one.plain == 4.0
    assert one.relative_to(4.0) == one, "once"


def test_costs_stay_where_no_plain_step_was_kept() -> None:
    one = timed(1.2, 2.4, None)
    assert one.relative_to(4.0) is one


def test_an_image_counts_with_its_plain_steps() -> None:
    one = timed(1.25, 2.5, 4.0)
    assert one.speed(1) == one.promise(1) == 2.0, "nothing was drawn"
    one.count({4: [300, 150], 1: [100, 100]})
    one.count({4: [200, 50]})
    one.images = 2
    drafted, plain = 200 + 100, 100  # the promise counts for as many steps as an image
    assert one.speed(1) == pytest.approx((drafted * 2.5 + plain) / (drafted * 1.25 + plain))
    assert one.promise(1) == 2.0, "which knows of the best length alone"
    assert one.speed(4) < one.speed(1), "a batch waits for its slowest image"


def test_one_image_counts_no_more_than_another() -> None:
    hard, easy = timed(1.2, 2.0, 4.0), timed(1.2, 2.0, 4.0)
    for one, counts in ((hard, [220, 200]), (easy, [110, 100])):
        one.prior = {1: 1.0, 4: 2.0}
        one.count({4: counts})
        one.images = 1
    worth = [one.weighed().draft_lengths[1].tokens_per_step for one in (hard, easy)]
    assert worth[0] == pytest.approx(worth[1], abs=0.03)
    share = PRIOR_IMAGES / (1 + PRIOR_IMAGES)
    assert worth[0] == pytest.approx(1.1 + share * 0.9, abs=1e-3)
    hard.sure = DRAFTER_STEPS  # what is known is another temperature's
    less = hard.weighed().draft_lengths[1].tokens_per_step
    assert less is not None and less < 1.1 + 0.5 * 0.9, "it counts for less than the image"


def test_a_source_that_was_known_to_pay_is_given_up_by_some_images_alone() -> None:
    one = timed(1.2, 2.0, 4.0)
    assert not one.young, "nothing was known beforehand"
    one.prior = {1: 1.0, 4: 2.0}
    assert not one.young, "what it costs is enough to leave it before an image was drawn"
    one.images = 1
    assert one.young
    one.images = FEWEST_IMAGES
    assert not one.young
