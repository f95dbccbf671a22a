"""Sources of drafts: one file each, with the same methods and one registration.

``none`` drafts nothing, ``drafter`` and ``beam`` a drafter's chain or tree, ``window`` and ``head`` the
model's own earlier guesses, ``copy`` the model's quantized weights. A source of another package is a
:class:`~lantern_accel.strategy.sources.DraftSource` and a subclass of :class:`TreeDrafts`, or of
:class:`CertainDrafts`, with :func:`register`.
"""

from __future__ import annotations

from lantern_accel.decoding.drafts import DraftContext, Drafts, register, serving
from lantern_accel.decoding.sources.tree import CertainDrafts, Kept, TreeDrafts

__all__ = ["CertainDrafts", "DraftContext", "Drafts", "Kept", "TreeDrafts", "register", "serving"]
