"""Janus's family presents itself; nothing of it is imported before it is asked for."""

from __future__ import annotations

from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.families.spec import FamilySpec


@hookimpl
def lantern_accel_families() -> list[FamilySpec]:
    """Return the family."""
    return [
        FamilySpec(
            name="janus",
            summary="Janus-Pro and Janus 1.3B: text to pictures, on a Llama",
            family="lantern_accel.families.janus.family:JanusFamily",
            api_version=1,
            priority=5,
        )
    ]
