"""Where a step's nodes lie in the target's cache, and how what is kept of them becomes known.

A tree's accepted path may lie in any of its nodes' slots, so a table says which slot each position has
(:mod:`~.tree_layout`). A window's token keeps the slot of its number (:mod:`~.window_layout`). No key or
value moves in either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.state import State
from lantern_accel.decoding.verify import Verifying

S = TypeVar("S", bound=State)
#: What is drafted, what is judged, and what is kept of it.
D = TypeVar("D")
J = TypeVar("J")
K = TypeVar("K")


class Layout(ABC, Generic[S, D, J, K]):
    """The slots of one step's nodes, on the buffers of the longest step."""

    geometry_type: ClassVar[type[Geometry]]
    state_type: ClassVar[type[State]]

    def __init__(self, verifying: Verifying, geometry: Geometry, longest: Geometry) -> None:
        self.verifying, self.geometry, self.longest = verifying, geometry, longest

    def moves(self, state: S) -> dict[str, Callable[[], None]]:
        """Return what must run before such steps: ``gather`` after longer ones."""
        return {}

    @abstractmethod
    def verify(self, state: S, drafted: D, slots: int | None = None) -> tuple[Tensor, Tensor]:
        """Run every node in one pass; return features ``[R, T, D]`` and guided logits [B, T, V].

        ``slots``: how many of the cache are looked at, the first ones; None: all.
        """

    @abstractmethod
    def keep(self, state: S, drafted: D, features: Tensor, judged: J) -> K:
        """Write the tokens that became known; complete images stay as they are."""

    @abstractmethod
    def advance(self, state: S, judged: J, kept: K) -> None:
        """Move images on, and count the step."""
