"""Finds what each device gives a buyer: images per second, per joule and per currency unit, on his terms.

Of every device that is the strategy and batch size with the most goodput within the terms: requests that
come too late count as time spent and as no image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from lantern_accel.errors import RequestError, did_you_mean, shown
from lantern_accel.measure.record import (
    Cell,
    Interval,
    NotMeasured,
    Reading,
    Run,
)
from lantern_accel.quality import interval as intervals
from lantern_accel.records import Record
from lantern_accel.report.rows import Row, readings

#: The largest price and bound that are believed; larger ones are typing mistakes.
MOST = 1e9
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+) ?(?P<unit>[A-Za-z]{3}|[$€£¥])?")


#: What an offer says as its row does.
OF_ROW = (
    *("run", "strategy", "batch", "temperature", "fidelity", "latency"),
    *("joules_per_image", "images_per_joule"),
)


class Terms(Record):
    """What a buyer asks for."""

    tv_budget: float = Field(
        0.0, ge=0, le=1, description="share of a token's probability that may be moved; 0: exact"
    )
    latency_s: float | None = Field(None, gt=0, description="seconds that a request may take")
    prices: dict[str, float] = Field(
        default_factory=dict, description="price of an hour of a run's device, by the run's name"
    )
    currency: str = Field("", description="of all prices; empty: nobody named it")


class Offer(Record):
    """What a device gives for the terms: its best strategy and batch size."""

    run: str
    strategy: str
    batch: int
    temperature: float
    fidelity: str
    moved: float = Field(description="share of a token's probability that is moved away")
    images_per_second: Interval = Field(description="of requests in time, over all requests' time")
    in_time: float = Field(description="share of the requests that were in time")
    latency: dict[str, Interval | NotMeasured] = Field(
        description="seconds per request, by percentile"
    )
    joules_per_image: Reading
    images_per_joule: Reading
    price_per_hour: float | None
    images_per_unit: float | None = Field(description="images per unit of the currency")
    cost_of_1000: Interval | None = Field(description="of 1,000 images, in the currency")


class Refusal(Record):
    """A device that has nothing to offer on these terms, and why."""

    run: str
    reason: str


def read_prices(
    words: Sequence[str], runs: Sequence[Run], called: Sequence[set[str]]
) -> tuple[dict[str, float], str]:
    """Return the price of an hour by a run's name, and the currency of all prices.

    ``words``: each ``NAME=AMOUNT``, such as ``gpu=2.10EUR``; ``called``: the names that each run answers
    to. Raises RequestError for what is not a price, and for a name that no run has.
    """
    prices: dict[str, float] = {}
    units: set[str] = set()
    for word in words:
        name, sign, amount = word.rpartition("=")
        found = _AMOUNT.fullmatch(amount.strip())
        price = float(found["number"]) if found else math.nan
        if not sign or not name or found is None or not 0 < price <= MOST:
            raise RequestError(
                f"--price {shown(word)} is not a price; write NAME=AMOUNT, such as gpu=2.10EUR for an "
                "hour of the device of run gpu"
            )
        mine = [run for run, names in zip(runs, called, strict=True) if name in names]
        if len(mine) != 1:
            every = sorted(set.union(*called)) if called else []
            which = "names several runs" if mine else "names no run"
            raise RequestError(
                f"--price {shown(word)}: {shown(name)} {which}{did_you_mean(name, every)}; give a "
                "run a name with NAME=FILE"
            )
        prices[mine[0].name] = price
        units.add(found["unit"] or "")
    if len(units) > 1:
        listed = " and ".join(sorted(unit or "no currency" for unit in units))
        raise RequestError(f"prices are in {listed}; write all of them in one currency")
    return prices, "".join(units)


def offers(runs: Sequence[Run], rows: Sequence[Row], terms: Terms) -> list[Offer | Refusal]:
    """Return what each device offers, cheapest or else fastest first, then those without an offer."""
    found: list[Offer] = []
    refused: list[Refusal] = []
    for run in runs:
        mine = [row for row in rows if row.run == run.name]
        if not mine:
            continue
        good = [row for row in mine if row.moved is not None and row.moved <= terms.tv_budget]
        made = [one for row in good if (one := _offer(run, row, terms)) is not None]
        served = [one for one in made if one.images_per_second.value > 0]
        if served:
            found.append(max(served, key=lambda one: one.images_per_second.value))
            continue
        why = "whole requests were not timed" if good else "nothing that was measured is so exact"
        why = f"no request took {terms.latency_s:g} s or less" if made else why
        refused.append(Refusal(run=run.name, reason=why))
    found.sort(key=lambda one: -one.images_per_second.value)
    costs = {one.run: one.cost_of_1000.value for one in found if one.cost_of_1000 is not None}
    if len(costs) == len(found):
        found.sort(key=lambda one: costs[one.run])
    return [*found, *refused]


def _offer(run: Run, row: Row, terms: Terms) -> Offer | None:
    """Return what a row gives for the terms; None where its requests were not timed as a whole."""
    cell = cell_of(run, row)
    totals = readings([s.total for s in cell.samples])
    if isinstance(totals, str):
        return None
    bound = math.inf if terms.latency_s is None else terms.latency_s
    images = [float(s.images) for s in cell.samples]
    served = [n if total <= bound else 0.0 for n, total in zip(images, totals, strict=True)]
    rate = intervals.paired(intervals.share, served, totals)
    price = terms.prices.get(run.name)
    cost = None
    if price is not None and rate.low > 0:
        each = 1000 * price / 3600
        cost = Interval(
            value=each / rate.value, low=each / rate.high, high=each / rate.low, n=rate.n
        )
    return Offer(
        **{name: getattr(row, name) for name in OF_ROW},
        moved=row.moved or 0.0,
        images_per_second=rate,
        in_time=float(np.mean([total <= bound for total in totals])),
        price_per_hour=price,
        images_per_unit=None if price is None else 3600 * rate.value / price,
        cost_of_1000=cost,
    )


def cell_of(run: Run, row: Row) -> Cell:
    """Return the cell that a row was made of."""
    key = row.strategy, row.batch, row.temperature
    return next(
        c for c in run.cells if (c.strategy.name, c.batch, c.temperature) == key and c.samples
    )
