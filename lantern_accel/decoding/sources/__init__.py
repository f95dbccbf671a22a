"""Sources of drafts: one file each, with the same methods and one registration.

``none`` drafts nothing, ``drafter`` a drafter's chain or tree, ``window`` the model's own earlier
guesses. A source of another package is a :class:`~lantern_accel.strategy.sources.DraftSource` and a
subclass of :class:`Drafts` with :func:`register`.
"""

from __future__ import annotations

from lantern_accel.decoding.sources.base import (
    CertainDrafts,
    Drafts,
    Kept,
    Setting,
    register,
    serving,
)

__all__ = ["CertainDrafts", "Drafts", "Kept", "Setting", "register", "serving"]
