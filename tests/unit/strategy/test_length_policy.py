"""The rule that chooses a window's length: most tokens per second, from counts."""

from __future__ import annotations

from lantern_accel.strategy.length_policy import AcceptancePolicy, LengthStats
from lantern_accel.strategy.lengths import in_batch, usual_tokens_per_step
from lantern_accel.strategy.sources import DraftLength

PACES = (
    DraftLength(length=1, cost=1.0, tokens_per_step=1.0),
    DraftLength(length=4, cost=1.3, tokens_per_step=2.0),
    DraftLength(length=16, cost=2.1, tokens_per_step=3.0),
)


def steps(rule: AcceptancePolicy, length: int, gained: float, count: int, left: int = 200) -> int:
    now = length
    for number in range(count):
        whole = int(gained) + (1 if (number * (gained % 1)) % 1 + gained % 1 >= 1 else 0)
        now = rule.observe(LengthStats(length, 1, (whole,), (left,)))
    return now


def test_it_begins_with_the_longest_of_what_is_about_the_best() -> None:
    assert AcceptancePolicy(PACES).begin() == 16
    dear = DraftLength(length=16, cost=2.6, tokens_per_step=3.0)
    assert AcceptancePolicy((*PACES[:2], dear)).begin() == 4


def test_no_length_that_promises_less_than_plain_decoding_is_used() -> None:
    costs = (1.0, 2.1, 3.2)  # as in large batches
    rule = AcceptancePolicy(
        tuple(p.model_copy(update={"cost": c}) for p, c in zip(PACES, costs, strict=True))
    )
    assert rule.begin() == 1
    rule.now = 16
    assert rule.best(None) == 1


def test_much_acceptance_makes_windows_longer() -> None:
    dear = DraftLength(length=16, cost=2.6, tokens_per_step=3.0)
    rule = AcceptancePolicy((*PACES[:2], dear))
    assert steps(rule, rule.begin(), 4.0, 60) == 16


def test_no_acceptance_ends_in_plain_decoding_and_is_tried_again() -> None:
    rule = AcceptancePolicy(PACES)
    assert steps(rule, rule.begin(), 1.0, 60) == 1
    assert steps(rule, 1, 1.0, 400) > 1


def test_nothing_longer_than_what_is_left_pays() -> None:
    rule = AcceptancePolicy(PACES)
    assert steps(rule, rule.begin(), 4.0, 60) == 16
    assert rule.observe(LengthStats(16, 1, (4,), (2,))) == 4
    assert rule.observe(LengthStats(4, 1, (1,), (1,))) == 1


def test_a_batch_is_as_fast_as_its_last_image() -> None:
    costly = (PACES[0], PACES[1].model_copy(update={"cost": 1.6}))
    rule, left = AcceptancePolicy(costly), (200, 200)
    assert rule.begin() == 4
    for _ in range(60):  # one image gains much, the other nothing: on average the window would pay
        now = rule.observe(LengthStats(4, 1, (3, 1), left))
    assert now == 1 and rule.best(None) == 4
    assert rule.best((200, 0)) == 4, "the slow one is complete"
    assert rule.best((200, 40)) == 4, "the slow one is far ahead"


def test_what_was_learned_of_an_image_fades() -> None:
    rule = AcceptancePolicy(PACES)
    rule.begin()
    for _ in range(60):
        rule.observe(LengthStats(4, 1, (4, 1), (200, 200)))
    apart = rule.own[0] - rule.own[1]
    rule.observe(LengthStats(1, 100, (100, 100), (100, 100)))
    assert apart > 1 and 0 < rule.own[0] - rule.own[1] < apart / 3


def test_an_image_forgets_the_one_before() -> None:
    rule = AcceptancePolicy(PACES)
    steps(rule, rule.begin(), 1.0, 60)
    assert rule.begin() == 16


def test_small_gains_move_nothing() -> None:
    rule = AcceptancePolicy(
        (DraftLength(length=1, cost=1.0), DraftLength(length=4, cost=1.0, tokens_per_step=1.04)),
        now=1,
    )
    assert rule.best(None) == 1


def test_drafts_that_promise_next_to_nothing_are_not_made() -> None:
    near = DraftLength(length=4, cost=1.96, tokens_per_step=2.0)
    assert AcceptancePolicy((PACES[0], near)).begin() == 1
    assert AcceptancePolicy((PACES[0], near), gain=1.02).begin() == 1
    assert AcceptancePolicy((PACES[0], PACES[1]), gain=1.02).begin() == 4


def test_more_is_asked_of_drafts_in_a_batch() -> None:
    little = DraftLength(length=4, cost=1.6, tokens_per_step=1.9)
    assert AcceptancePolicy((PACES[0], little)).begin() == 4
    assert AcceptancePolicy((PACES[0], little), images=8).begin() == 1
    assert in_batch(1.9, 1) == 1.9 and in_batch(1.9, 4) < 1.9 and in_batch(3.0, 1 << 20) == 1.0


def test_usual_worth_lies_between_its_points() -> None:
    assert usual_tokens_per_step(1) == 1
    assert usual_tokens_per_step(8) < usual_tokens_per_step(10) < usual_tokens_per_step(12)
    assert usual_tokens_per_step(256) == usual_tokens_per_step(64)
