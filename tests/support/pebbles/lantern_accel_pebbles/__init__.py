"""Pebbles: a family of models in a package of its own. Listing it imports no torch."""

from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.families.spec import FamilySpec


@hookimpl
def lantern_accel_families():
    return [
        FamilySpec(
            name="pebbles",
            summary="pebbles on a beach, by number",
            family="lantern_accel_pebbles.family:Pebbles",
            api_version=1,
        )
    ]
