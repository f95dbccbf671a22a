"""Lumina-mGPT 2.0's family presents itself; nothing of it is imported before it is asked for."""

from lantern_accel.families.spec import FamilySpec, offer

lantern_accel_families = offer(
    FamilySpec(
        name="lumina2",
        summary="Lumina-mGPT 2.0: text to images at 8 px a token, on Chameleon's trunk",
        family="lantern_accel.families.lumina2.family:Lumina2Family",
        api_version=1,
        # Before Chameleon's, as which its configuration presents it: the vocabulary tells them apart.
        priority=11,
    )
)
