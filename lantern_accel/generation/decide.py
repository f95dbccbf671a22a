"""Decides what images are decoded with, by values: what is asked, what was measured, and what fits.

It makes no engine and takes no time: :class:`~.measurements.Measurements` was asked before.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lantern_accel.families.base import Size
from lantern_accel.generation import auto_constants as auto
from lantern_accel.generation.decision import BatchPlan, Decision
from lantern_accel.generation.estimate import Estimate
from lantern_accel.records import Frozen
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import AUTO, NoTree, Sampling, Strategy

if TYPE_CHECKING:
    from lantern_accel.memory.limits import Capacity


class Timings(Frozen):
    """What is known of auto's candidates for some rows: sources that were ``timed``, in one measurement.

    ``taken``: what is decoded with in any case, since ``tune`` raced it, or since nothing is timed here.
    """

    timed: tuple[Estimate, ...] = ()
    taken: Strategy | None = None


@dataclass(frozen=True)
class Workload:
    """Images of one shape to decode with one strategy.

    ``rows``: of a batch by its images, the largest batch first; ``size``: width and height that were
    asked for; ``place``: model, device and dtype, by the names of a decision's fields.
    """

    strategy: Strategy
    sampling: Sampling
    rows: Mapping[int, int]
    place: Mapping[str, str]
    shape: Hashable = None
    size: Size | None = None


def decide(work: Workload, measurements: Mapping[int, Timings], capacity: Capacity) -> Decision:
    """Return what images are decoded with; ``measurements``: of auto's candidates, by rows."""
    parts = []
    for images, rows in work.rows.items():
        used, best = work.strategy, None
        if used.name == AUTO:
            used, best = choose_source(used, measurements[rows], rows, capacity)
        need, exact = capacity.bytes_of(rows, used, work.sampling, work.shape), best and best.exact
        sizes = {"images": images, "rows": rows, "memory": need, "free": capacity.free}
        parts.append(BatchPlan(strategy=used, exact_tokens_per_step=exact, **sizes))
    asked = {"asked": work.strategy.name, "sampling": work.sampling, "size": work.size}
    return Decision(**work.place, **asked, parts=tuple(parts))


def choose_source(
    asked: Strategy, timings: Timings, batch: int, capacity: Capacity | None = None
) -> tuple[Strategy, Estimate | None]:
    """Return what auto decodes a batch with, and its estimate where it was timed.

    That is the source with the highest predicted speed. Plain decoding, where none is
    :data:`~.auto_constants.ENOUGH` faster, or where a copy to draft with does not fit.
    """
    strategy, best = timings.taken, None
    if strategy is None:
        best = max(timings.timed, key=lambda one: one.promise(batch))
        strategy = best.strategy if best.promise(batch) >= auto.ENOUGH else None
    if strategy is not None and (capacity is None or capacity.holds(strategy)):
        return strategy, best
    # Nothing is drafted, so that nothing is relaxed.
    update = {"drafts": NoTree(), "acceptance": Exact(), "tv_budget": None}
    return asked.model_copy(update=update), None
