"""Says what a choice of lengths sees: counts alone; no draft's distribution depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class LengthStats:
    """Steps of one length: how many, the tokens that each image gained, and those that it still lacks."""

    length: int
    steps: int
    gained: tuple[int, ...]
    left: tuple[int, ...]


class LengthPolicy(Protocol):
    """Chooses lengths among those of a window; gets counts only."""

    def begin(self) -> int:
        """Return the length of an image's first steps."""

    def observe(self, block: LengthStats) -> int:
        """Return the length of the next steps, after those of ``block``."""

    def forget(self, row: int) -> None:
        """Forget what was learned of a row, which another image takes."""
