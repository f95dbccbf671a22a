"""The buyer's curve: images per second of a device over the seconds of a request, point by point."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from lantern_accel.measure.record import Cell, Interval, NotMeasured, Reading, Run, is_measured
from lantern_accel.records import Record
from lantern_accel.report.rows import Row, disturbed, readings, why_unjudged
from lantern_accel.report.terms import JOULES_PER_KWH, Terms

Key = tuple[str, str, int, float, bool]


class Point(Record):
    """One strategy on one device at one batch size, or under one number of requests at once."""

    run: str
    strategy: str
    batch: int = Field(description="images together; for a service: requests at once")
    temperature: float
    service: bool = Field(False, description="through the service, so that requests wait in line")
    fidelity: str
    moved: float | None = Field(description="share of a token's probability; None: not known")
    images_per_second: Interval
    seconds_per_image: Interval
    latency: dict[str, Interval | NotMeasured] = Field(description="seconds of a request")
    in_time: float = Field(description="share of the requests within the bound; 1 without one")
    requests: int
    joules_per_image: Reading
    images_per_kwh: Reading
    doubt: str = Field("", description="why it is not judged; empty: it is")
    unsettled: str = Field("", description="why it gets no verdict; empty: it gets one")
    front: bool = Field(True, description="nothing else on this device is better in every way")

    @property
    def key(self) -> Key:
        """What tells points apart."""
        return self.run, self.strategy, self.batch, self.temperature, self.service

    @property
    def setting(self) -> str:
        """How many images at once, in words."""
        return f"{self.batch} at once" if self.service else f"batch {self.batch}"

    @property
    def seconds(self) -> float:
        """Median seconds from a request to its images."""
        found = self.latency["p50"]
        return found.value if isinstance(found, Interval) else math.nan


def points_of(
    runs: Sequence[Run], rows: Sequence[Row], terms: Terms
) -> tuple[list[Point], dict[Key, list[float]]]:
    """Return the points of rows whose requests were timed as a whole, and their seconds per image."""
    cells = {
        (run.name, c.strategy.name, c.batch, c.temperature, False): c
        for run in runs
        for c in run.cells
        if c.samples
    }
    points, seconds = [], {}
    for row in rows:
        cell = cells[row.run, row.strategy, row.batch, row.temperature, False]
        point = _point(row, cell, terms)
        if point is not None:
            points.append(point)
            seconds[point.key] = [float(s.total) / cell.batch for s in cell.samples]
    return [one.model_copy(update={"front": _on_front(one, points)}) for one in points], seconds


def _point(row: Row, cell: Cell, terms: Terms) -> Point | None:
    totals = readings([s.total for s in cell.samples])
    rate, each = row.images_per_second, row.seconds_per_image
    if isinstance(totals, str) or isinstance(rate, str) or isinstance(each, str):
        return None
    return Point(
        **row.model_dump(
            include={"run", "strategy", "batch", "temperature", "joules_per_image", "latency"}
        ),
        fidelity=row.fidelity,
        moved=row.moved,
        images_per_second=rate,
        seconds_per_image=each,
        in_time=float(np.mean([total <= (terms.latency_s or math.inf) for total in totals])),
        requests=len(totals),
        images_per_kwh=per_kwh(row.joules_per_image),
        doubt=disturbed(cell),
        unsettled=why_unjudged(cell),
    )


def per_kwh(joules: Reading) -> Reading:
    """Return images per kilowatt-hour; the reason where no meter was read."""
    return JOULES_PER_KWH / joules if is_measured(joules) and joules else joules


def _on_front(point: Point, points: Sequence[Point]) -> bool:
    """Say whether no other point of the device is at least as good in all and better in something.

    An exact strategy is not worse for a relaxed one that is faster: fidelity counts, too.
    """

    def measures(one: Point) -> tuple[float, float, float]:
        moved = math.inf if one.moved is None else one.moved
        return -one.images_per_second.value, one.seconds, moved

    own = measures(point)
    mine = [
        measures(one)
        for one in points
        if (one.run, one.service, one.temperature) == (point.run, point.service, point.temperature)
        and not one.doubt
    ]
    return not any(
        all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in mine
    )
