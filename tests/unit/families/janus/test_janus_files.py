"""Janus's folders: what is read off them, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.janus import write_janus

from lantern_accel.errors import CheckpointError
from lantern_accel.families import registry
from lantern_accel.families.janus import official
from lantern_accel.families.registry import entry
from lantern_accel.memory.plan import planner_for
from lantern_accel.models.locate import find_model


def test_a_generation_that_nothing_says_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_janus(tmp_path / "x")
    assert find_model(folder).manifest.variant == "pro"
    # Both generations have these sizes now, as Janus-Pro-1B and Janus-1.3B do.
    entries = [entry("janus-pro-1b"), entry("janus-1.3b")]
    for module in (official, registry):
        monkeypatch.setattr(module, "entries_like", lambda _: entries)
    with pytest.raises(CheckpointError, match=r"--model janus-pro-1b=.*x \(or janus-1.3b\)"):
        find_model(folder)
    found = find_model(f"janus-1.3b={folder}")
    assert (found.manifest.variant, found.manifest.name) == ("1.3b", "janus-1.3b")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("janus-pro-1b", 1.52e9), ("janus-pro-7b", 6.7e9), ("janus-1.3b", 1.52e9)],
)
def test_published_models_are_planned_before_anything_is_fetched(
    name: str, parameters: float
) -> None:
    planner = planner_for(name, memory=24 * 10**9)
    plan = planner.plan()
    # Two bytes a number, and the table that the aligner is folded into.
    assert plan.weights["target"] == pytest.approx(2 * parameters, rel=0.1)
    assert plan.fits
    assert plan.weights["vq"] == pytest.approx(4 * 71.9e6, rel=0.01)
