"""A buyer's terms, and the points of the plot: images per second over seconds per request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from pydantic import Field

from lantern_accel.device.host_load import BUSY
from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import (
    Interval,
    LoadCell,
    NotMeasured,
    Reading,
    Run,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.quality import interval as intervals
from lantern_accel_profiles.report.rows import (
    PERCENTILES,
    Row,
    busy_words,
    describe_disturbance,
    fidelity_words,
    pool_samples,
    readings,
    row_of,
    why_unjudged,
)

Key = tuple[str, str, int, float, bool]
HOURS_PER_YEAR = 8760
JOULES_PER_KWH = 3.6e6
#: Samples that the images of a load are cut into, at most.
MOST_GROUPS = 10
#: What a point has as its row does.
OF_ROW = (
    "run", "strategy", "detail", "batch", "temperature", "fidelity", "moved", "latency",
    "joules_per_image",
)  # fmt: skip


class Cost(Record):
    """What 1,000 images cost on a device, in the currency of the terms."""

    of_1000: Interval
    covers: str = Field(description="what is in it: rent, purchase, power")
    without: str = Field("", description="what is not, and why; empty: nothing is missing")


class Terms(Record):
    """A buyer's terms. Amounts are by the name of a run."""

    tv_budget: float = Field(
        0.0, ge=0, le=1, description="largest total variation per token; 0: exact"
    )
    latency_s: float | None = Field(
        None, gt=0, description="largest seconds of 95 % of the requests"
    )
    rent: dict[str, float] = Field(default_factory=dict, description="of a device for an hour")
    buy: dict[str, float] = Field(default_factory=dict, description="purchase of a device")
    years: float = Field(3.0, gt=0, description="that a bought device runs without pause")
    power: float | None = Field(None, ge=0, description="of a kilowatt-hour")
    overhead: float = Field(
        1.0, ge=1, description="the site's power over the device's (PUE); multiplies joules"
    )
    currency: str = Field("", description="of all amounts; empty: nobody named it")

    def hourly(self, run: str) -> float | None:
        """Return what a run's device costs per hour, its power left out where it was bought."""
        if run in self.buy:
            return self.buy[run] / (self.years * HOURS_PER_YEAR)
        return self.rent.get(run)

    def cost(self, run: str, seconds: Interval, joules: Reading) -> Cost | None:
        """Return what 1,000 images cost that take ``seconds`` and ``joules`` each; None: no amount.

        Power is in a rent. Without a meter it is left out by name, never counted as 0.
        """
        hourly, covers, without, fixed = self.hourly(run), [], "", 0.0
        if hourly is not None:
            covers.append("purchase" if run in self.buy else "rent")
        else:
            without = "the device: no --rent or --buy was given"
        if run not in self.rent:
            if self.power is None:
                without = "power: no --power was given"
            elif is_measured(joules):
                covers.append("power")
                fixed = 1e3 * joules * self.overhead / JOULES_PER_KWH * self.power
            else:
                without = "power: no meter was read"
        if not covers:
            return None
        ends = {
            end: fixed + (hourly or 0.0) * getattr(seconds, end) / 3.6
            for end in ("value", "low", "high")
        }
        return Cost(
            of_1000=Interval(**ends, n=seconds.n), covers=" and ".join(covers), without=without
        )

    def words(self) -> str:
        """Return the terms in words, for a sentence."""
        exact = (
            f"a TV of at most {self.tv_budget:g} per token" if self.tv_budget else "exact decoding"
        )
        latency = "no bound on latency"
        if self.latency_s is not None:
            latency = f"95 % of the requests within {self.latency_s:g} s"
        costs = [] if self.amounts else ["no cost of a device given (--buy, --rent)"]
        if self.buy:
            costs.append(f"bought devices that run for {self.years:g} years without pause")
        if self.power is not None:
            costs.append(f"{self.power:g} {self.currency} per kWh, times {self.overhead:g}")
        return ", ".join([exact, latency, *costs])

    @property
    def amounts(self) -> bool:
        """Whether anything was said of costs."""
        return bool(self.rent or self.buy or self.power is not None)


class Point(Record):
    """One strategy on one device at one batch size, or under one number of requests at once."""

    run: str
    strategy: str
    detail: str = Field("", description="what it decodes with, in words")
    batch: int = Field(description="batch size; for a service: requests at once")
    temperature: float
    service: bool = Field(False, description="through a service, whose requests wait in a queue")
    fidelity: str
    moved: float | None = Field(description="TV per token; None: unknown")
    images_per_second: Interval
    seconds_per_image: Interval
    latency: dict[str, Interval | NotMeasured] = Field(description="seconds of a request")
    in_time: float = Field(description="share of the requests within the bound; 1 without one")
    requests: int
    joules_per_image: Reading
    first_partial_s: Reading = not_measured("asked of services")
    doubt: str = Field("", description="why its times are not believed; empty: they are")
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
        """Median seconds from a request to its images; of one request what its images took together."""
        found, alone = self.latency["p50"], self.batch * self.seconds_per_image.value
        return found.value if isinstance(found, Interval) else alone


def points_of(
    runs: Sequence[Run], rows: Sequence[Row], terms: Terms
) -> tuple[list[Point], dict[Key, list[float]]]:
    """Return the points of requests that were timed as a whole, and their seconds per image.

    Cells of one run that did the same work are one point.
    """
    ready = {(row.run, row.strategy, row.batch, row.temperature): row for row in rows}
    found: list[tuple[Point, list[float]]] = []
    for run in runs:
        for measured in run.cells:
            if not measured.samples or (cell := pool_samples(run, measured)) is None:
                continue
            row = ready[run.name, cell.strategy.name, cell.batch, cell.temperature]
            if cell is not measured:
                row = row_of(run.model_copy(update={"cells": [cell]}), cell)
            totals = readings([s.total for s in cell.samples])
            rate, each = row.images_per_second, row.seconds_per_image
            if isinstance(totals, str) or isinstance(rate, str) or isinstance(each, str):
                continue
            point = Point(
                **{name: getattr(row, name) for name in OF_ROW},
                images_per_second=rate,
                seconds_per_image=each,
                in_time=_share_within(totals, terms),
                requests=len(totals),
                doubt=describe_disturbance(cell),
                unsettled=why_unjudged(cell),
            )
            found.append((point, [total / cell.batch for total in totals]))
        found += [one for load in run.loads if (one := _load_point(run, load, terms)) is not None]
    points = [one for one, _ in found]
    for point in points:
        point.front = _on_front(point, points)
    return points, {one.key: seconds for one, seconds in found}


def _share_within(seconds: Sequence[float], terms: Terms) -> float:
    """Return the share of requests within the bound on latency; infinite: without an image."""
    bound = terms.latency_s or math.inf
    return float(np.mean([one <= bound and math.isfinite(one) for one in seconds]))


def _load_point(run: Run, cell: LoadCell, terms: Terms) -> tuple[Point, list[float]] | None:
    """Return the point of a service under a load, and its seconds per image; None without images.

    Images come in groups of as many as the service decodes together, so that a sample is the mean of one
    group or more. A request without an image is late for any bound.
    """
    ends = sorted(s.ended for s in cell.samples if s.outcome == "ok" and s.ended <= cell.ended)
    ends = [cell.began, *(end for end in ends if end > cell.began)]
    group = max(cell.slots or cell.clients, math.ceil(len(ends) / MOST_GROUPS))
    marks = ends[::group]
    seconds = [(b - a) / group for a, b in pairwise(marks) if b > a]
    came = [one for one in cell.latencies if math.isfinite(one)]
    if not seconds or not came:
        return None
    rounding = run.settings.rounding
    spent = readings([s.total_variation_per_token for s in cell.samples]) if cell.relaxed else [0.0]
    moved = None if isinstance(spent, str) else float(np.mean(spent))
    if moved is not None and rounding is not None:
        moved += float(np.mean(rounding.by_image))
    doubt = ""
    if is_measured(cell.others_cpu) and cell.others_cpu > BUSY:
        doubt = busy_words(cell.others_cpu)
    if any(s.ended < s.began or (is_measured(s.first) and s.first > s.ended) for s in cell.samples):
        doubt = "a clock jumped: an image came before its request"
    each, first = intervals.median(seconds), cell.first_partials
    point = Point(
        run=run.name,
        strategy=cell.strategy,
        batch=cell.clients,
        temperature=run.settings.sampling.temperature,
        service=True,
        fidelity=fidelity_words(moved),
        moved=moved,
        images_per_second=intervals.reciprocal(each),
        seconds_per_image=each,
        latency={f"p{p}": intervals.percentile(came, p) for p in PERCENTILES},
        in_time=_share_within(cell.latencies, terms),
        requests=len(cell.latencies),
        joules_per_image=cell.joules_per_image,
        first_partial_s=float(np.median(first)) if first else not_measured("no partial image came"),
        doubt=doubt,
        unsettled=doubt,
    )
    return point, seconds


def _on_front(point: Point, points: Sequence[Point]) -> bool:
    """Say whether no other point of the device is at least as good in all and better in something.

    An exact strategy is not worse for a relaxed one that is faster: fidelity counts, too.
    """

    def measures(one: Point) -> tuple[float, float, float]:
        moved = math.inf if one.moved is None else one.moved
        return -one.images_per_second.value, one.seconds, moved

    own, kind = measures(point), (point.run, point.service, point.temperature)
    return not any(
        (one.run, one.service, one.temperature) == kind
        and not one.doubt
        and measures(one) != own
        and all(a <= b for a, b in zip(measures(one), own, strict=True))
        for one in points
    )
