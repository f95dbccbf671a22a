"""The decision how a request is decoded, as one value that is made before any engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lantern_accel.errors import RequestError
from lantern_accel.records import Frozen, format_bytes
from lantern_accel.strategy.lengths import SURE, in_batch
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

if TYPE_CHECKING:
    from lantern_accel.generation.request import GenerationRequest


class BatchPlan(Frozen):
    """How one batch is decoded.

    ``rows``: rows of the engine; ``images``: those of them that the request needs. ``memory``: estimated
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
    name; ``parts``: the largest batch, then that of the remaining images.
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
