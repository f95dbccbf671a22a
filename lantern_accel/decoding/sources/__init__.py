"""Sources of drafts: one file each, with the same methods and one registration.

``none`` drafts nothing, ``drafter`` and ``beam`` a drafter's chain or tree, ``window`` and ``head`` the
model's own earlier guesses, ``copy`` the model's quantized weights. A source of another package is a
:class:`~lantern_accel.strategy.sources.DraftConfig` and a subclass of :class:`TreeDrafts`, or of
:class:`CertainDrafts`, with :func:`register`.
"""

from __future__ import annotations

from lantern_accel.decoding.drafts import SERVED, DraftContext, DraftSource, Source, register
from lantern_accel.decoding.sources import beam, copy, head, none, static
from lantern_accel.decoding.sources.tree import CertainDrafts, CommittedPath, TreeDrafts
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.strategy import Strategy

__all__ = [
    "CertainDrafts",
    "CommittedPath",
    "DraftContext",
    "DraftSource",
    "TreeDrafts",
    "register",
    "serving",
]
#: Our files, each of which registers its own when it is imported.
__all__ += ["beam", "copy", "head", "none", "static"]


def serving(strategy: Strategy, greedy: bool) -> type[Source]:
    """Return what serves a strategy's source; raises StrategyError where nothing was registered."""
    source = strategy.drafts
    made = SERVED.get(type(source))
    if made is None:
        raise StrategyError(
            f"nothing is registered that makes drafts of the kind {source.kind!r}; register it "
            "with lantern_accel.decoding.sources.register"
        )
    return made.select_class(strategy, greedy)
