"""Janus's family presents itself; nothing of it is imported before it is asked for."""

from lantern_accel.families.spec import FamilySpec, offer

lantern_accel_families = offer(
    FamilySpec(
        name="janus",
        summary="Janus-Pro and Janus 1.3B: text to images, on a Llama",
        family="lantern_accel.families.janus.family:JanusFamily",
        api_version=1,
        priority=5,
    )
)
