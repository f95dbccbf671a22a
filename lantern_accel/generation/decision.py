"""The decision how a request is decoded: one value, made from what is asked, measured, and fits.

It is made before any engine and takes no time: :class:`~.measurements.Measurements` was asked before.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lantern_accel.errors import RequestError
from lantern_accel.generation import auto_constants as auto
from lantern_accel.records import Frozen, format_bytes
from lantern_accel.strategy.lengths import SURE, in_batch
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.sources import with_tokens_per_step
from lantern_accel.strategy.values import AUTO, NoTree, Sampling, Strategy

if TYPE_CHECKING:
    from lantern_accel.families.base import Size
    from lantern_accel.generation.request import GenerationRequest
    from lantern_accel.memory.limits import Capacity


class BatchPlan(Frozen):
    """How one batch is decoded.

    ``rows``: rows of the engine; ``images``: rows that the request needs. ``memory``: estimated
    bytes of buffers, tables and workspace, or an upper bound if that fits. ``free``: free bytes; None:
    the device does not report them. ``exact_tokens_per_step``: tokens per step of exact decoding with
    the same drafts, if ``auto`` timed it.
    """

    images: int = Field(ge=1)
    rows: int = Field(ge=1)
    strategy: Strategy
    memory: int
    free: int | None
    exact_tokens_per_step: float | None = None


class Decision(Frozen):
    """How a request is decoded: strategies with their draft lengths and costs, batches and memory.

    It is valid for one model, device, dtype and kind of sampling. ``asked``: the requested strategy's
    name; ``parts``: the largest batch, then the batch of the remaining images.
    """

    kind: Literal["lantern_accel.decision"] = "lantern_accel.decision"
    schema_version: Literal[1] = 1
    model: str
    weights_hash: str
    backend: str
    device: str
    dtype: str
    asked: str
    sampling: Sampling
    size: tuple[int, int] | None
    parts: tuple[BatchPlan, ...] = Field(min_length=1)

    @property
    def strategy(self) -> Strategy:
        """The strategy of most images."""
        return self.parts[0].strategy

    @property
    def batch(self) -> int:
        """The largest batch size."""
        return self.parts[0].images

    def chunks(self, wanted: Sequence[int]) -> Iterator[tuple[BatchPlan, Sequence[int]]]:
        """Divide images into batches, each with the smallest part that fits it."""
        for at in range(0, len(wanted), self.batch):
            chunk = wanted[at : at + self.batch]
            fitting = [one for one in self.parts if one.images >= len(chunk)]
            yield min(fitting, key=lambda one: one.images), chunk

    def text(self) -> list[str]:
        """Return a line of text for each part."""
        lines = []
        for one in self.parts:
            what = describe_auto(one.strategy, one.rows) if self.asked == AUTO else self.asked
            costs = ", ".join(
                f"{p.length}: {p.cost:.2f}" for p in one.strategy.lengths if p.cost is not None
            )
            lines.append(
                f"{one.images} at once in {one.rows} rows: {what}"
                + (f"; cost of a step by length: {costs}" if costs else "")
                + f"; at most {format_bytes(one.memory)} of buffers and workspace"
                + ("" if one.free is None else f" of {format_bytes(one.free)} free")
            )
        return lines

    def check(self, here: Mapping[str, str], request: GenerationRequest) -> None:
        """Raise RequestError if the decision does not fit the request, or ``here``.

        ``here``: the model and device in use, by the names of the fields.
        """
        names = {
            "weights_hash": "the weights", "model": "the model", "backend": "the backend",
            "device": "the device", "dtype": "the dtype", "size": "the size", "asked": "the strategy",
        }  # fmt: skip
        own = self.model_dump(include={*names})
        used = {**here, "size": request.size, "asked": request.strategy.name}
        differs = [
            f"{what} {own[name]!r}, not {used[name]!r}"
            for name, what in names.items()
            if own[name] != used[name]
        ]
        if self.sampling.bucket != request.sampling.bucket:
            differs.append("other guidance or filters than the request's")
        if request.strategy.name != AUTO and request.strategy != self.strategy:
            differs.append("other drafts or another acceptance rule than the request's")
        if request.batch_size not in (None, self.batch):
            differs.append(f"batch size {self.batch}, not {request.batch_size}")
        if differs:
            raise RequestError(
                f"this decision is for {differs[0]}; omit `decision`, or request the same"
            )


def describe_auto(strategy: Strategy, images: int = 1, passes: str = "") -> str:
    """Return what auto decodes with, in a few words.

    ``images``: batch size; ``passes``: the measured forward passes, in words.
    """
    rule = "relaxed" if strategy.acceptance.relaxed else "exact"
    drafts = strategy.drafts
    plain = f"plain decoding ({rule}): no drafts were faster when timed here at this batch size"
    if drafts.shape == ():
        return plain
    if not strategy.lengths:
        return f"{strategy.name} ({rule}){passes}"
    timed = [one for one in strategy.lengths if one.cost is not None]
    longest = (timed or list(strategy.lengths))[-1].length
    speeds = [in_batch(p.tokens_per_step or 1.0, images) / (p.cost or 1.0) for p in timed]
    if timed and max(speeds) < SURE:
        return plain
    return f"{drafts.text(longest)} ({rule}){passes}"


# --- what it is made from -------------------------------------------------------------------------


class Estimate(Frozen):
    """The estimate of a draft source: a strategy whose lengths have tokens per step and costs.

    ``times``: the shortest step by length, in milliseconds. ``exact``: for relaxed strategies, the tokens
    per step of exact decoding with the same drafts.
    """

    strategy: Strategy
    times: dict[int, float] = Field(default_factory=dict)
    exact: float | None = None

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        times: Mapping[int, Sequence[float]],
        tokens: Mapping[int, float] | None = None,
    ) -> Estimate:
        """Build an estimate from step times in milliseconds by draft length; length 1 is required.

        ``tokens``: tokens per step by length, for lengths without them.
        """
        lengths = with_tokens_per_step(strategy.lengths, tokens or {})
        least = {n: min(ms) for n, ms in times.items()}
        made = cls(strategy=strategy.with_drafts(draft_lengths=lengths), times=least)
        return made.with_costs(least[1])

    def with_costs(self, plain: float) -> Estimate:
        """Return the estimate with costs from its times. A length without a time keeps its cost.

        ``plain``: the shortest plain step of any source, in milliseconds. A length costs no more than a
        longer one, because other load makes times longer, never shorter.
        """
        least, costs = math.inf, {1: 1.0}
        for length in sorted(self.times.keys() - {1}, reverse=True):
            costs[length] = least = min(least, max(1.0, self.times[length] / plain))
        lengths = tuple(
            one.model_copy(update={"cost": costs.get(one.length, one.cost)})
            for one in self.strategy.lengths
        )
        strategy = self.strategy.with_drafts(draft_lengths=lengths)
        return self.model_copy(update={"strategy": strategy})

    def predict_speedup(self, images: int) -> float:
        """Return the predicted speed of a batch at the best timed length, over plain decoding."""
        return max(
            in_batch(one.tokens_per_step or 1.0, images) / one.cost
            for one in self.strategy.lengths
            if one.cost is not None
        )


class Timings(Frozen):
    """The candidates of auto for some rows: sources that were ``timed``, in one measurement.

    ``taken``: what is decoded with in any case, since ``tune`` raced it, or since nothing is timed here.
    """

    timed: tuple[Estimate, ...] = ()
    taken: Strategy | None = None


def decide(
    asked: Strategy,
    sampling: Sampling,
    rows: Mapping[int, int],
    measurements: Mapping[int, Timings],
    capacity: Capacity,
    place: Mapping[str, str],
    shape: Hashable = None,
    size: Size | None = None,
) -> Decision:
    """Return what images of one shape are decoded with.

    ``rows``: of a batch by its images, the largest batch first; ``measurements``: of auto's candidates,
    by rows; ``place``: model, device and dtype, by the names of the decision's fields; ``size``: width
    and height that were asked for.
    """
    parts = []
    for images, count in rows.items():
        strategy, best = asked, None
        if asked.name == AUTO:
            strategy, best = choose_source(asked, measurements[count], count, capacity)
        plan = BatchPlan(
            images=images,
            rows=count,
            strategy=strategy,
            memory=capacity.bytes_of(count, strategy, sampling, shape),
            free=capacity.free,
            exact_tokens_per_step=best and best.exact,
        )
        parts.append(plan)
    return Decision(**place, asked=asked.name, sampling=sampling, size=size, parts=tuple(parts))


def choose_source(
    asked: Strategy, timings: Timings, batch: int, capacity: Capacity | None = None
) -> tuple[Strategy, Estimate | None]:
    """Return what auto decodes a batch with, and its estimate where it was timed.

    That is the source with the highest predicted speed. Plain decoding, where none is
    :data:`~.auto_constants.ENOUGH` faster, or where a copy to draft with does not fit.
    """
    strategy, best = timings.taken, None
    if strategy is None:
        best = max(timings.timed, key=lambda one: one.predict_speedup(batch))
        strategy = best.strategy if best.predict_speedup(batch) >= auto.ENOUGH else None
    if strategy is not None and (capacity is None or capacity.holds(strategy)):
        return strategy, best
    # Nothing is drafted, so that nothing is relaxed.
    update = {"drafts": NoTree(), "acceptance": Exact(), "tv_budget": None}
    return asked.model_copy(update=update), None
