"""Every field of a file that is read, replaced by what does not belong there: refused, or taken."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.runs import invented_run

from lantern_accel.errors import LanternError
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import DynamicTree, Strategy, named_strategy
from lantern_accel_profiles.measure.reading import read_file

WRONG: tuple[Any, ...] = (None, [1, [2]], {"a": []}, "x", -1)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give where every value stands; of a list only the first two."""
    yield at
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, held in inside:
        yield from places(held, (*at, key))


@contextlib.contextmanager
def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Iterator[Any]:
    """Give the value with another one in it, and put back what stood there."""
    if not at:
        yield new
        return
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    before, inner[at[-1]] = inner[at[-1]], copy.deepcopy(new)
    try:
        yield value
    finally:
        inner[at[-1]] = before


def sweep(
    value: Any, read: Callable[[Any], object], refused: type[Exception], each: int = 1
) -> int:
    """Read the value with each n-th field replaced; return how many were refused."""
    count = 0
    for at in list(places(value))[::each]:
        for new in WRONG:
            try:
                with replaced(value, at, new) as wrong:
                    read(wrong)
            except refused:
                count += 1
            except Exception as error:
                raise AssertionError(f"{at} = {new!r} ended in {error!r}") from error
    return count


@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_with_any_field_replaced_is_read_or_refused(tmp_path: Path, each: int) -> None:
    path = tmp_path / "run.json"

    def read(value: Any) -> None:
        path.write_text(json.dumps(value))
        read_file(path)

    value = json.loads(invented_run(names=("vanilla", "lantern++")).model_dump_json())
    assert sweep(value, read, LanternError, each) > 1000 // each


@pytest.mark.parametrize("name", ["scd", "eagle2", "lantern", "lantern++"])
def test_a_strategy_with_any_field_replaced_is_read_or_refused(name: str) -> None:
    static = parse_drafts("0,1,2,00")
    known = named_strategy(name, static=static, dynamic=DynamicTree(top_k=3, depth=2, total=9))
    value = json.loads(known.model_dump_json())
    assert sweep(value, Strategy.model_validate, ValidationError) > 20
