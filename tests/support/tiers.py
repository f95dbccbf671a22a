"""What the quick tier leaves of a test's cases: each value of each parameter, and no products of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Place = tuple[Hashable, ...]


def quick_cases(
    cases: Sequence[Mapping[str, Hashable]],
    together: Iterable[Sequence[str]] = (),
    whole: Sequence[str] = (),
) -> list[int]:
    """Return which cases of a test run in the quick tier: a diagonal through the product of its axes.

    ``cases`` give each parameter's value. Parameters of one of ``together`` are one axis, as those of one
    ``parametrize`` are; axes that have names of ``whole`` are one too, so that their product runs.
    """
    groups = [tuple(names) for names in together]
    grouped = {name for names in groups for name in names}
    groups += [(name,) for name in cases[0] if name not in grouped]
    merged = tuple(name for names in groups if {*names} & {*whole} for name in names)
    groups = [names for names in groups if not {*names} & {*whole}] + ([merged] if merged else [])
    axes = [[tuple(case[name] for name in names) for case in cases] for names in groups]
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


def leave_products_to_the_long_tier(items: Iterable[pytest.Item]) -> None:
    """Mark cases ``long`` that no value of a parameter needs; ``product`` names those that stay."""
    tests: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        if getattr(item, "callspec", None) and not item.get_closest_marker("long"):
            tests[item.parent, getattr(item, "originalname", item.name)].append(item)
    for cases in tests.values():
        product = cases[0].get_closest_marker("product")
        if product is not None and not product.args:
            continue
        together = [names_of(one) for one in cases[0].iter_markers("parametrize")]
        # Cases of one value of a ``parametrize`` have the same object.
        given = [{name: id(v) for name, v in case.callspec.params.items()} for case in cases]
        quick = quick_cases(given, together, product.args if product else ())
        for at in {*range(len(cases))}.difference(quick):
            cases[at].add_marker(pytest.mark.long)
