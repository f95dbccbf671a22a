"""What tests of profiling share: prompts, and few samples of few strategies."""

from __future__ import annotations

import pytest

from lantern_accel_profiles.measure import ceilings, environment

STRATEGIES = "vanilla,eagle,lantern++"
PROMPTS = ("red heart", "dog face")
FEW = ("--quick", "--samples", "2", "--quality-images", "4", "--strategy", STRATEGIES)


def small_ceilings(patch: pytest.MonkeyPatch) -> None:
    """Let a device's ceilings be measured in no time, and let nobody look at the machine's load."""
    patch.setattr(environment, "busy_note", str)
    patch.setattr(ceilings, "READING", 2e-4)
    patch.setattr(ceilings, "REPEATS", 2)
    patch.setattr(ceilings, "LARGEST_BUFFER", 2**20)
    patch.setattr(ceilings, "LARGEST_MATRIX", 512)
    patch.setattr(ceilings, "STOPWATCH_WORK", 0.004)
    patch.setattr(
        ceilings, "STOPWATCH_RATIO", (0.3, 3)
    )  # other work on the machine is not the question
