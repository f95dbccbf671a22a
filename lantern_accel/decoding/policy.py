"""Chooses the length of the next steps.

Whatever the rule, the images follow the target's distribution, as long as it reads counts only. How many
drafts a step keeps is settled by the tests up to the first that fails. What lies behind it was drawn from
the distributions that are kept with it, given everything before it, whether or not the next window covers
it: so no choice that is made from such counts changes the law of a draft that is still to be tested. A
rule that looked at the drafts themselves could drop just those that it dislikes, and would bias the
images; it is not given them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Block:
    """Steps of one length: how many, the tokens that each image gained, and those that it still lacks."""

    length: int
    steps: int
    gained: tuple[int, ...]
    left: tuple[int, ...]


class LengthPolicy(Protocol):
    """Chooses lengths among those of a window; gets counts only."""

    def begin(self) -> int:
        """Return the length of an image's first steps."""
        ...

    def observe(self, block: Block) -> int:
        """Return the length of the next steps, after those of ``block``."""
        ...

    def forget(self, row: int) -> None:
        """Forget what was learned of a row, which another image takes."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """One length for all steps."""

    length: int

    def begin(self) -> int:
        return self.length

    def observe(self, block: Block) -> int:
        return self.length

    def forget(self, row: int) -> None:
        pass
