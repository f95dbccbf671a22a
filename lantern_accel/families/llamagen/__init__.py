"""LlamaGen's family presents itself; nothing of it is imported before it is asked for."""

from __future__ import annotations

from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.families.spec import FamilySpec


@hookimpl
def lantern_accel_families() -> list[FamilySpec]:
    """Return the family."""
    return [
        FamilySpec(
            name="llamagen",
            summary="LlamaGen and the bundled model: classes or captions, positions of a grid",
            family="lantern_accel.families.llamagen.family:LlamaGenFamily",
            api_version=1,
            priority=20,
        )
    ]
