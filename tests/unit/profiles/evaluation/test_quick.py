"""What a quick evaluation measures at least."""

from __future__ import annotations

from lantern_accel_profiles.evaluation.schema import Settings


def test_a_quick_frontier_has_enough_prompts_for_an_interval() -> None:
    assert Settings.quick().frontier_prompts >= 4
