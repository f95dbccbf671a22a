"""Chameleon's family presents itself; nothing of it is imported before it is asked for."""

from lantern_accel.families.spec import FamilySpec, offer

lantern_accel_families = offer(
    FamilySpec(
        name="chameleon",
        summary="Anole and Lumina-mGPT: text and images in one vocabulary",
        family="lantern_accel.families.chameleon.family:ChameleonFamily",
        api_version=1,
        priority=10,
    )
)
