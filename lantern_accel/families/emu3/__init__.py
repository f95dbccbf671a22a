"""Emu3's family presents itself; nothing of it is imported before it is asked for."""

from lantern_accel.families.spec import FamilySpec, offer

lantern_accel_families = offer(
    FamilySpec(
        name="emu3",
        summary="Emu3-Gen and Emu3.5-Image: text and images in one vocabulary, by a plain decoder",
        family="lantern_accel.families.emu3.family:Emu3Family",
        api_version=1,
        priority=12,
    )
)
