"""Describes a family of models before it is loaded; imports neither torch nor the family.

A plug-in's first module needs only this one and :func:`~lantern_accel.device.hookspecs.hookimpl`::

    from lantern_accel.device.hookspecs import hookimpl
    from lantern_accel.families.spec import FamilySpec

    @hookimpl
    def lantern_accel_families():
        return [
            FamilySpec(
                name="pebbles",
                summary="pictures of pebbles",
                family="lantern_accel_pebbles.family:Pebbles",
                api_version=1,
            )
        ]
"""

from __future__ import annotations

from dataclasses import dataclass

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
