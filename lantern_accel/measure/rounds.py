"""Takes turns, and estimates what a run still takes from what its cells have taken so far.

In turns, whatever disturbs a machine for a while disturbs everything that is compared. The estimate is
made anew after every sample: cells that run later, prices included, count from the start, so that it
shrinks instead of beginning again with every batch size.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lantern_accel.measure.record import WARMUPS, Cell, Plan, is_measured

Entry = TypeVar("Entry")
#: Requests whose median stands for the next one: what disturbed the machine long ago does not count.
RECENT = 5
#: Timed samples per cell at most, however fast the device is.
MOST_SAMPLES = 300
#: Decodings that a cold cell takes before its first sample, and a warm one after a break.
COLD, WARM = 7, 4


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


def request_seconds(cell: Cell, cells: Sequence[Cell]) -> float | None:
    """Return the seconds that the next request of a cell should take; None where nothing is known.

    A cell that has not run is taken for its strategy at another batch size, or else for the median cell,
    in proportion to its images.
    """
    own = _own_seconds(cell)
    if own is not None:
        return own
    known = [(one, seconds) for one in cells if (seconds := _own_seconds(one)) is not None]
    alike = [each for each in known if each[0].strategy.name == cell.strategy.name] or known
    if not alike:
        return None
    return cell.batch * statistics.median(seconds / one.batch for one, seconds in alike)


def _own_seconds(cell: Cell) -> float | None:
    recent = [s.wall for s in cell.samples[-RECENT:] if is_measured(s.wall)]
    if recent:
        return statistics.median(recent)
    return min((w.seconds for w in cell.warmup[1:]), default=None)


def seconds_left(cells: Sequence[Cell], plan: Plan, session: int, images: int = 0) -> float | None:
    """Return the seconds until every cell has its samples, and ``images`` more are drawn for prices.

    ``session``: the one that is running; warm-up is repeated in each. None: nothing has run yet.
    """
    total, per_image = 0.0, []
    for cell in cells:
        each = request_seconds(cell, cells)
        if each is None:
            return None
        per_image.append(each / cell.batch)
        taken = sum(s.wall for s in cell.samples if is_measured(s.wall))
        missing = max(plan.samples - len(cell.samples), 0)
        most = (MOST_SAMPLES - len(cell.samples)) * each
        waiting = max(missing * each, min(plan.seconds - taken, most))
        if waiting <= 0:
            continue
        warm = sum(w.session == session for w in cell.warmup)
        ready = warm >= WARMUPS and any(s.session == session for s in cell.samples)
        usual = COLD if not cell.warmup else WARM
        total += waiting + (0.0 if ready else max(usual - warm, 0) * each)
    return total + (images * statistics.median(per_image) if per_image else 0.0)
