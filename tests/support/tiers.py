"""What is run of a test's cases: each value of a parameter, and each pair of two in the long tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Place = tuple[Hashable, ...]


def axes_of(
    cases: Sequence[Mapping[str, Hashable]],
    together: Iterable[Sequence[str]] = (),
    whole: Sequence[str] = (),
) -> list[list[Place]]:
    """Return each case's place on every axis; see :func:`quick_cases` for what is one axis."""
    groups = [tuple(names) for names in together]
    grouped = {name for names in groups for name in names}
    groups += [(name,) for name in cases[0] if name not in grouped]
    merged = tuple(name for names in groups if {*names} & {*whole} for name in names)
    groups = [names for names in groups if not {*names} & {*whole}] + ([merged] if merged else [])
    return [[tuple(case[name] for name in names) for case in cases] for names in groups]


def pair_cases(axes: Sequence[Sequence[Place]], quick: Sequence[int]) -> list[int]:
    """Return the further cases that it takes for each pair of two axes' values to occur.

    Of one axis or two that is every case.
    """
    if len(axes) < 3:
        return sorted({*range(len(axes[0]))}.difference(quick))
    pairs = [set(combinations(enumerate(place), 2)) for place in zip(*axes, strict=True)]
    missing = set().union(*pairs).difference(*(pairs[at] for at in quick))
    further = []
    while missing:
        further.append(max(range(len(pairs)), key=lambda at: len(pairs[at] & missing)))
        missing -= pairs[further[-1]]
    return further


def quick_cases(
    cases: Sequence[Mapping[str, Hashable]],
    together: Iterable[Sequence[str]] = (),
    whole: Sequence[str] = (),
) -> list[int]:
    """Return which cases of a test run in the quick tier: a diagonal through the product of its axes.

    ``cases`` give each parameter's value. Parameters of one of ``together`` are one axis, as those of one
    ``parametrize`` are; axes that have names of ``whole`` are one too, so that their product runs.
    """
    axes = axes_of(cases, together, whole)
    values = [list(dict.fromkeys(axis)) for axis in axes]
    most = max(map(len, values))
    # Axes of one length move together only where there is no space for all of their pairs.
    steps, taken = [], defaultdict[int, int](lambda: 1)
    for some in values:
        fits = taken[len(some)] * len(some) <= most
        steps.append(taken[len(some)] if fits else 1)
        taken[len(some)] *= len(some) if fits else 1
    diagonal = {
        tuple(some[at // step % len(some)] for some, step in zip(values, steps, strict=True))
        for at in range(most)
    }
    places = list(zip(*axes, strict=True))
    chosen = [at for at, place in enumerate(places) if place in diagonal]
    seen = {one for at in chosen for one in enumerate(places[at])}
    for at, place in enumerate(places):  # where the product has holes
        if missing := {*enumerate(place)} - seen:
            chosen.append(at)
            seen |= missing
    return sorted(chosen)


def names_of(marker: pytest.Mark) -> list[str]:
    """Return the parameters that a ``parametrize`` gives."""
    names = marker.args[0] if marker.args else marker.kwargs["argnames"]
    return [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)


def leave_products(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Mark cases ``long`` that no value of a parameter needs, and return those that no pair needs.

    ``product`` names the parameters whose product stays.
    """
    left: set[pytest.Item] = set()
    tests: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        if getattr(item, "callspec", None):
            tests[item.parent, getattr(item, "originalname", item.name)].append(item)
    for cases in tests.values():
        product = cases[0].get_closest_marker("product")
        if product is not None and not product.args:
            continue
        together = [names_of(one) for one in cases[0].iter_markers("parametrize")]
        # Cases of one value of a ``parametrize`` have the same object.
        given = [{name: id(v) for name, v in case.callspec.params.items()} for case in cases]
        whole = product.args if product else ()
        free = [at for at, case in enumerate(cases) if not case.get_closest_marker("long")]
        some = quick_cases([given[at] for at in free], together, whole) if free else []
        quick = [free[at] for at in some]
        further = pair_cases(axes_of(given, together, whole), quick)
        for at in {*range(len(cases))}.difference(quick):
            cases[at].add_marker(pytest.mark.long)
            if at not in further:
                left.add(cases[at])
    return left
