"""Every field of a file that is read, replaced by what does not belong there: refused, or taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.runs import invented_run

from fuzz.damage import apply_json, paths
from lantern_accel.errors import LanternError
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import DynamicTree, Strategy, named_strategy
from lantern_accel_profiles.measure.reading import read_file

WRONG: tuple[Any, ...] = (None, [1, [2]], {"a": []}, "x", -1)


def sweep(
    base: Path, read: Callable[[str], object], refused: type[Exception], each: int = 1
) -> int:
    """Read a JSON file's text with each n-th field replaced; return how many were refused."""
    count = 0
    for at in paths(json.loads(base.read_text()))[::each]:
        for new in WRONG:
            try:
                read(apply_json(base, [(at, new)]))
            except refused:
                count += 1
            except Exception as error:
                raise AssertionError(f"{at} = {new!r} ended in {error!r}") from error
    return count


@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_with_any_field_replaced_is_read_or_refused(tmp_path: Path, each: int) -> None:
    base, path = tmp_path / "whole.json", tmp_path / "run.json"
    base.write_text(invented_run(names=("vanilla", "lantern++")).model_dump_json())

    def read(text: str) -> None:
        path.write_text(text)
        read_file(path)

    assert sweep(base, read, LanternError, each) > 1000 // each


@pytest.mark.parametrize("name", ["scd", "eagle2", "lantern", "lantern++"])
def test_a_strategy_with_any_field_replaced_is_read_or_refused(tmp_path: Path, name: str) -> None:
    static = parse_drafts("0,1,2,00")
    known = named_strategy(name, static=static, dynamic=DynamicTree(top_k=3, depth=2, total=9))
    base = tmp_path / "strategy.json"
    base.write_text(known.model_dump_json())
    assert sweep(base, Strategy.model_validate_json, ValidationError) > 20
