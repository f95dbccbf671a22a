"""LlamaGen's family presents itself; nothing of it is imported before it is asked for."""

from lantern_accel.families.spec import FamilySpec, offer

lantern_accel_families = offer(
    FamilySpec(
        name="llamagen",
        summary="LlamaGen and the bundled model: classes or captions, positions of a grid",
        family="lantern_accel.families.llamagen.family:LlamaGenFamily",
        api_version=1,
        priority=20,
    )
)
