"""Describes a family of models before it is loaded; imports neither torch nor the family.

A plug-in's first module needs only this one::

    from lantern_accel.families.spec import FamilySpec, offer

    lantern_accel_families = offer(
        FamilySpec(
            name="pebbles", summary="images of pebbles",
            family="lantern_accel_pebbles.family:Pebbles", api_version=1,
        )
    )
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lantern_accel.device.hookspecs import hookimpl

FAMILY_API_VERSION = 1
"""Version of :class:`lantern_accel.families.base.Family`; a family written for another is reported."""


@dataclass(frozen=True)
class FamilySpec:
    """One family before it is loaded.

    ``name``: a lower-case identifier, what a model's manifest calls its family. ``summary``: one line.
    ``family``: where its class is, ``package.module:Class``. ``api_version``: the number that the family
    was written for, written out. ``priority``: families are asked whose files lie at a path, and checked
    by the conformance kit, in descending order.
    """

    name: str
    summary: str
    family: str
    api_version: int
    priority: int = 0


def offer(*specs: FamilySpec) -> Callable[[], list[FamilySpec]]:
    """Return the hook of a plug-in that presents these families."""

    @hookimpl
    def lantern_accel_families() -> list[FamilySpec]:
        """Return the families."""
        return list(specs)

    return lantern_accel_families
