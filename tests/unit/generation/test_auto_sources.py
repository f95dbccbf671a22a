"""Tests of what auto chooses among sources that were timed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from lantern_accel.decoding.length_policy import tokens_of
from lantern_accel.generation.auto import Auto
from lantern_accel.generation.comparison import MOST_NEAR, TIMED_AFTER, Comparison
from lantern_accel.generation.timed import (
    DRAFTER_STEPS,
    FEWEST_IMAGES,
    PRIOR_IMAGES,
    Timed,
)
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, Strategy, Window


def timed(cost: float, brings: float, plain: float | None) -> Timed:
    """Return a window of four whose costs are relative to a plain step of ``plain`` ms."""
    lengths = (
        DraftLength(length=1, cost=1.0, tokens_per_step=1.0),
        DraftLength(length=4, cost=cost, tokens_per_step=brings),
    )
    one = Timed(strategy=Strategy(drafts=Window(length=4, draft_lengths=lengths)))
    return one if plain is None else one.timed_again({1: [plain], 4: [cost * plain]})


def test_sources_are_compared_by_the_least_plain_step() -> None:
    beside_slow_steps = timed(1.2, 2.4, 5.0)  # 6 ms: it looks twice as fast as plain decoding
    beside_fast_ones = timed(1.4, 2.4, 4.0)  # 5.6 ms
    assert beside_slow_steps.promise(1) > beside_fast_ones.promise(1)
    one = beside_slow_steps.relative_to(4.0)
    assert one.promise(1) < beside_fast_ones.promise(1)
    assert [length.cost for length in one.draft_lengths] == [1.0, 1.5]
    assert one.relative_to(4.0) == one, "once"
    both = Comparison(timed=[beside_slow_steps, beside_fast_ones]).level()
    assert both.timed == [one, beside_fast_ones] and both.best(1) == beside_fast_ones


def test_costs_stay_where_no_plain_step_was_kept() -> None:
    one = timed(1.2, 2.4, None)
    assert one.relative_to(4.0) is one
    assert Comparison(timed=[one]).level().timed == [one]


def test_a_source_that_was_timed_in_a_busy_minute_gets_another_chance() -> None:
    windows, copy = timed(2.4, 3.6, 4.0), timed(2.4, 4.2, 4.0)
    found = Comparison(timed=[windows, copy], images=1)
    assert found.best(1) is copy and found.due
    assert found.near(1) == [1, 0], "it promises less, and may yet be better"
    found.timed[0] = windows.timed_again({1: [4.1, 4.4], 4: [9.7, 7.2, 8.0]})
    found.timed[1] = copy.timed_again({1: [4.3], 4: [9.9]})
    found.timings += 1
    assert not found.due, "until more images were drawn"
    level = found.level()
    assert level.best(1).times == {1: 4.0, 4: 7.2}
    assert level.best(1).promise(1) == pytest.approx(3.6 * 4.0 / 7.2)
    assert level.timed[1].promise(1) == copy.promise(1), "noise makes no time shorter"


def test_a_length_that_looked_hopeless_may_be_timed_later() -> None:
    lengths = (
        DraftLength(length=1, cost=1.0, tokens_per_step=1.0),
        DraftLength(length=2, cost=1.2, tokens_per_step=1.6),
        DraftLength(length=4, tokens_per_step=2.4),
    )
    one = Timed(
        strategy=Strategy(drafts=Window(length=4, draft_lengths=lengths)), times={1: 4.0, 2: 4.8}
    )
    assert [p.length for p in one.relative_to(4.0).draft_lengths] == [1, 2]
    again = one.timed_again({1: [4.0], 2: [5.0], 4: [4.9]}).relative_to(4.0)
    costs = {p.length: p.cost for p in again.draft_lengths}
    assert costs == pytest.approx({1: 1.0, 2: 1.2, 4: 1.225})
    assert again.promise(1) == pytest.approx(2.4 / 1.225)


def test_steps_are_timed_after_some_images_and_then_no_more() -> None:
    found = Comparison(timed=[timed(1.2, 2.4, 4.0)])
    drawn = []
    for image in range(1, 30):
        assert found.count(None, {}, 1) == (not found.ends)
        if found.due:
            drawn.append(image)
            found.timings += 1
    assert drawn == list(TIMED_AFTER) and found.ends and not found.due


def test_who_is_timed_again() -> None:
    good, near, far = timed(1.0, 2.0, 4.0), timed(1.0, 1.5, 4.0), timed(1.0, 1.2, 4.0)
    assert Comparison(timed=[far, near, good]).near(1) == [2, 1]
    assert Comparison(timed=[far]).near(1) == [0]
    hopeless = timed(2.0, 1.2, 4.0)
    assert Comparison(timed=[hopeless]).near(1) == [0], "plain steps are lengths too"
    many = Comparison(timed=[good] * 5)
    assert len(many.near(1)) == MOST_NEAR, "engines are kept for no more"


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


class Device:
    """A device whose steps are captured in no time."""

    capture_patience = math.inf


def lengthened(times: dict[int, float], rate: float, fits: bool = True) -> Timed:
    """Return windows that took so long by length, and whose drafts were kept at a rate, lengthened."""
    sizes = SimpleNamespace(manifest=SimpleNamespace(target=SimpleNamespace(num_tokens=256)))
    auto = Auto(sizes, Device(), torch.float32)  # type: ignore[arg-type]  # what is read of them
    auto.fits = lambda *given: fits
    lengths = tuple(
        DraftLength(length=n, cost=ms, tokens_per_step=tokens_of(rate, n))
        for n, ms in times.items()
    )
    tree = Window(length=max(times), draft_lengths=lengths)
    prior = {one.length: one.tokens_per_step or 1.0 for one in lengths}
    one = Timed(strategy=Strategy(drafts=tree), times=times, prior=prior)
    made = auto.lengthened(one, 1, Sampling(cfg_scale=3.0))
    assert made.times == times and made.draft_lengths == one.draft_lengths, (
        "the rest is not timed yet"
    )
    return made


def lengths_of(one: Timed) -> list[int]:
    tree = one.strategy.drafts
    assert isinstance(tree, Window) and tree.length == tree.draft_lengths[-1].length
    return [p.length for p in tree.draft_lengths]


def test_windows_grow_where_their_steps_are_cheap_and_drafts_are_kept() -> None:
    cheap = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.02, 16: 1.1}
    made = lengthened(cheap, rate=0.95)
    assert lengths_of(made) == [1, 2, 4, 8, 16, 32, 64]
    assert set(made.prior) == {1, 2, 4, 8, 16, 32, 64} and made.prior[32] > made.prior[16]
    middling = {1: 1.0, 2: 1.0, 4: 1.05, 8: 1.2, 16: 1.6}
    assert lengths_of(lengthened(middling, rate=0.95))[-1] > 16
    assert lengths_of(lengthened(middling, rate=0.3)) == [*middling], "what was counted decides"
    assert lengths_of(lengthened(cheap, rate=0.95, fits=False)) == [*cheap]
    dear = {1: 1.0, 2: 1.06, 4: 1.24, 8: 1.85, 16: 3.3}
    for rate in (0.3, 0.7):
        assert lengths_of(lengthened(dear, rate)) == [*dear]


def test_windows_keep_their_lengths_where_a_new_one_is_compiled_for_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "capture_patience", 30.0)
    assert lengths_of(lengthened({1: 1.0, 16: 1.0}, rate=0.95)) == [1, 16]
