"""Cases of the quick tier: each value of each parameter, and the products that are named."""

from __future__ import annotations

from itertools import product
from typing import Any

from support.tiers import axes_of, pair_cases, quick_cases


def cases(**sizes: int) -> list[dict[str, int]]:
    every = product(*(range(size) for size in sizes.values()))
    return [dict(zip(sizes, case, strict=True)) for case in every]


def chosen(given: list[dict[str, int]], **how: Any) -> list[tuple[int, ...]]:
    return [tuple(given[at].values()) for at in quick_cases(given, **how)]


def test_each_value_occurs_and_few_cases_are_left() -> None:
    assert chosen(cases(a=3, b=5)) == [(0, 0), (0, 3), (1, 1), (1, 4), (2, 2)]
    assert chosen(cases(a=4)) == [(0,), (1,), (2,), (3,)]


def test_a_product_that_is_named_is_whole() -> None:
    found = chosen(cases(a=2, b=3, c=4), whole=("a", "c"))
    assert len(found) == 8 and {(a, c) for a, _, c in found} == set(product(range(2), range(4)))
    assert {b for _, b, _ in found} == {0, 1, 2}


def test_no_value_is_lost_where_cases_are_missing() -> None:
    given = [case for case in cases(a=3, b=3) if case["a"] != case["b"]]
    found = chosen(given)
    assert {a for a, _ in found} == {b for _, b in found} == {0, 1, 2}


def test_the_long_tier_has_every_pair_and_not_the_product() -> None:
    given = cases(a=3, b=4, c=5, d=2)
    quick = quick_cases(given)
    further = pair_cases(axes_of(given), quick)
    places = [tuple(given[at].values()) for at in (*quick, *further)]
    for one, two in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3)):
        sizes = [max(place[axis] for place in places) + 1 for axis in (one, two)]
        assert len({(place[one], place[two]) for place in places}) == sizes[0] * sizes[1]
    assert 20 <= len(places) < 30 < len(given)
