"""Finds what each device gives a buyer: images per second and what 1,000 images cost, on his terms.

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
from lantern_accel.measure.record import Cell, Interval, NotMeasured, Reading, Run
from lantern_accel.quality import interval as intervals
from lantern_accel.records import Record
from lantern_accel.report.rows import Row, readings

#: The largest price and bound that are believed; larger ones are typing mistakes.
MOST = 1e9
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+) ?(?P<unit>[A-Za-z]{3}|[$€£¥])?")


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
    """What a device gives for the terms: its best strategy and batch size, or why it gives nothing."""

    run: str
    reason: str = Field("", description="why nothing is given; empty: the fields below say what is")
    strategy: str = ""
    batch: int = 0
    fidelity: str = ""
    images_per_second: Interval | None = Field(
        None, description="of requests in time, over all requests' time"
    )
    in_time: float = Field(0.0, description="share of the requests that were in time")
    latency: dict[str, Interval | NotMeasured] = Field(
        default_factory=dict, description="seconds per request, by percentile"
    )
    images_per_joule: Reading = 0.0
    cost_of_1000: Interval | None = Field(
        None, description="of 1,000 images, in the currency; None: no price was given"
    )


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
        name, _, amount = word.rpartition("=")
        found = _AMOUNT.fullmatch(amount.strip())
        price = float(found["number"]) if found else math.nan
        if not name or found is None or not 0 < price <= MOST:
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


def offers(runs: Sequence[Run], rows: Sequence[Row], terms: Terms) -> list[Offer]:
    """Return what each device offers, cheapest or else fastest first, then those without an offer."""
    found: list[Offer] = []
    refused: list[Offer] = []
    for run in runs:
        mine = [row for row in rows if row.run == run.name]
        if not mine:
            continue
        good = [row for row in mine if row.moved is not None and row.moved <= terms.tv_budget]
        made = [one for row in good if (one := _offer(run, row, terms)) is not None]
        best = max(made, key=_rate, default=None)
        if best is not None and _rate(best) > 0:
            found.append(best)
            continue
        why = "whole requests were not timed" if good else "nothing that was measured is so exact"
        why = f"no request took {terms.latency_s:g} s or less" if made else why
        refused.append(Offer(run=run.name, reason=why))
    found.sort(key=_rate, reverse=True)
    costs = {one.run: one.cost_of_1000.value for one in found if one.cost_of_1000 is not None}
    if len(costs) == len(found):
        found.sort(key=lambda one: costs[one.run])
    return found + refused


def _rate(offer: Offer) -> float:
    return 0.0 if offer.images_per_second is None else offer.images_per_second.value


def _offer(run: Run, row: Row, terms: Terms) -> Offer | None:
    """Return what a row gives for the terms; None where its requests were not timed as a whole."""
    cell = cell_of(run, row)
    totals = readings([s.total for s in cell.samples])
    if isinstance(totals, str):
        return None
    in_time = [total <= (terms.latency_s or math.inf) for total in totals]
    images = [float(s.images) * good for s, good in zip(cell.samples, in_time, strict=True)]
    rate = intervals.paired(intervals.share, images, totals)
    price = terms.prices.get(run.name)
    cost = None
    if price is not None and rate.low > 0:
        each = intervals.reciprocal(rate)
        cost = each.model_copy(
            update={end: getattr(each, end) * price / 3.6 for end in ("value", "low", "high")}
        )
    return Offer(
        **{
            name: getattr(row, name) for name in ("run", "strategy", "batch", "fidelity", "latency")
        },
        images_per_joule=row.images_per_joule,
        images_per_second=rate,
        in_time=float(np.mean(in_time)),
        cost_of_1000=cost,
    )


def cell_of(run: Run, row: Row) -> Cell:
    """Return the cell that a row was made of."""
    key = row.strategy, row.batch, row.temperature
    return next(
        c for c in run.cells if (c.strategy.name, c.batch, c.temperature) == key and c.samples
    )
