"""GLM-Image's family presents itself; nothing of it is imported before it is asked for."""

from lantern_accel.families.spec import FamilySpec, offer

lantern_accel_families = offer(
    FamilySpec(
        name="glm_image",
        summary="GLM-Image's autoregressive prior, which its diffusion decoder paints from",
        family="lantern_accel.families.glm_image.family:GlmImageFamily",
        api_version=1,
        priority=4,
    )
)
