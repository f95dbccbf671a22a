"""GLM-Image's family presents itself; nothing of it is imported before it is asked for."""

from __future__ import annotations

from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.families.spec import FamilySpec


@hookimpl
def lantern_accel_families() -> list[FamilySpec]:
    """Return the family."""
    return [
        FamilySpec(
            name="glm_image",
            summary="GLM-Image's autoregressive prior, which its diffusion decoder paints from",
            family="lantern_accel.families.glm_image.family:GlmImageFamily",
            api_version=1,
            priority=4,
        )
    ]
