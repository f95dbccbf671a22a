"""Taking turns: whatever disturbs a machine for a while then disturbs everything that is compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


def interleave(
    entries: Sequence[Entry],
    taken: Callable[[Entry], int],
    done: Callable[[Entry], bool],
    seed: int = 0,
) -> Iterator[Entry]:
    """Yield entries in rounds, each once per round, in an order that changes from round to round.

    ``taken(entry)`` counts the samples that an entry has: whoever has fewest is in the round, so that an
    interrupted series goes on with the round that it broke off. The caller takes one sample of each
    entry that it gets.
    """
    while waiting := [entry for entry in entries if not done(entry)]:
        number = min(taken(entry) for entry in waiting)
        order = [entry for entry in waiting if taken(entry) == number]
        random.Random(f"{seed}/{number}").shuffle(order)
        yield from order


def about(seconds: float) -> str:
    """Return a duration in words, as rough as an estimate is."""
    if seconds < 90:
        return f"about {max(round(seconds / 10), 1) * 10} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
