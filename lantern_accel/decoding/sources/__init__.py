"""Sources of drafts: one file each, with the same methods and one registration.

``none`` drafts nothing, ``drafter`` a drafter's chain or tree. Windows and drafts of the model's own
weights have engines of their own, which :mod:`lantern_accel.decoding.engines` knows. A source of
another package is a :class:`~lantern_accel.strategy.sources.DraftSource` and a subclass of
:class:`Drafts` with :func:`register`.
"""

from __future__ import annotations

from lantern_accel.decoding.sources.base import (
    CertainDrafts,
    Drafts,
    Kept,
    Setting,
    drafts_of,
    register,
)

__all__ = ["CertainDrafts", "Drafts", "Kept", "Setting", "drafts_of", "register"]
