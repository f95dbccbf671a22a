"""Chameleon's family presents itself; nothing of it is imported before it is asked for."""

from __future__ import annotations

from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.families.spec import FamilySpec


@hookimpl
def lantern_accel_families() -> list[FamilySpec]:
    """Return the family."""
    return [
        FamilySpec(
            name="chameleon",
            summary="Anole and Lumina-mGPT: text and pictures in one vocabulary",
            family="lantern_accel.families.chameleon.family:ChameleonFamily",
            api_version=1,
            priority=10,
        )
    ]
