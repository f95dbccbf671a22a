"""Finds each device's best offer for a buyer's terms, and ranks the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import Interval, NotMeasured, Run, is_measured
from lantern_accel_profiles.quality.interval import Verdict, unpaired_ratio
from lantern_accel_profiles.quality.interval import verdict as judge
from lantern_accel_profiles.report.names import hardware_words
from lantern_accel_profiles.report.points import Cost, Key, Point, Terms

#: The share of requests that must keep a bound on latency.
IN_TIME = 0.95
NO_METER = "energy: no meter"
#: Why a device has no verdict against another of its runs.
SAME_SETUP = "another run of the first device"


class Offer(Record):
    """A device's offer for the terms: its best strategy and batch size, or why it has none."""

    run: str
    hardware: str = Field("", description="cores and memory of the device")
    reason: str = Field("", description="why there is no offer; empty: there is one")
    point: Point | None = None
    cost: Cost | None = Field(None, description="None: no amount was given")
    measured: str = Field("", description="how much was measured, and what was wrong with it")
    missing: list[str] = Field(default_factory=list, description="what was not measured")
    behind: Interval | None = Field(
        None,
        description="ratio to the first offer of its kind, in speed or in cost",
    )
    verdict: Verdict | NotMeasured | None = Field(
        None, description="on the first offer over this one"
    )


def offers(
    runs: Sequence[Run],
    setups: Mapping[str, tuple[object, ...]],
    points: Sequence[Point],
    seconds: Mapping[Key, list[float]],
    terms: Terms,
) -> list[Offer]:
    """Return each device's offer, the best first, then the devices without an offer.

    ``setups``: by run, its device and all that may change its figures. The best is the cheapest if the
    costs of all offers have the same parts, and otherwise the fastest.
    """
    found: list[Offer] = []
    refused: list[Offer] = []
    for run in runs:
        for service in (False, True):
            mine = [one for one in points if (one.run, one.service) == (run.name, service)]
            if not mine:
                continue
            kept, why = _select(mine, terms)
            made = [_offer(run, mine, point, terms) for point in kept]
            if made:
                found.append(min(made, key=lambda one: (bool(_point(one).unsettled), _rank(one))))
            else:
                refused.append(Offer(run=run.name, reason=why))
    found.sort(key=lambda one: -_point(one).images_per_second.value)
    if ranked_by_cost(found):
        found.sort(key=_rank)
    return [_against(one, found, setups, seconds, terms) for one in found] + refused


def ranked_by_cost(found: Sequence[Offer]) -> bool:
    """Return whether the costs of all offers have the same parts, and can be compared."""
    parts = {one.cost and one.cost.without for one in found if not one.reason}
    return len(parts) == 1 and None not in parts


def _select(mine: Sequence[Point], terms: Terms) -> tuple[list[Point], str]:
    """Return the points that meet the terms, and the reason if none does."""
    judged = [one for one in mine if not one.doubt]
    good = [one for one in judged if one.moved is not None and one.moved <= terms.tv_budget]
    kept = [one for one in good if one.in_time >= IN_TIME]
    if not judged:
        return kept, f"no verdict: {mine[0].doubt}"
    if not good:
        return kept, "no measured strategy has a TV within the bound"
    most = f"at most {100 * max(one.in_time for one in good):.0f} % of its requests"
    took = "returned an image" if terms.latency_s is None else f"took {terms.latency_s:g} s or less"
    return kept, f"{most} {took}"


def _point(offer: Offer) -> Point:
    assert offer.point is not None  # an offer without a reason has one
    return offer.point


def _rank(offer: Offer) -> float:
    """Return the key of ranking, the smallest first: the cost, or the seconds per image."""
    if offer.cost is not None:
        return offer.cost.of_1000.value
    return _point(offer).seconds_per_image.value


def _offer(run: Run, mine: Sequence[Point], point: Point, terms: Terms) -> Offer:
    missing = [] if is_measured(point.joules_per_image) else [NO_METER]
    tails = [p for p, found in point.latency.items() if isinstance(found, str)]
    missing += [f"{' and '.join(tails)}: too few requests"] if tails else []
    most = max(one.batch for one in mine)
    missing.append(f"above {most} at once" if point.service else f"batches above {most}")
    measured = ["quick run"] if run.settings.plan.quick else []
    measured.append(f"{point.requests} requests" if point.requests > 1 else "1 request")
    measured += [] if run.state == "complete" else [f"the run is {run.state}"]
    return Offer(
        run=run.name,
        hardware=hardware_words(run),
        point=point,
        cost=terms.cost(run.name, point.seconds_per_image, point.joules_per_image),
        measured=", ".join(filter(None, [*measured, point.unsettled])),
        missing=missing,
    )


def _against(
    offer: Offer,
    found: Sequence[Offer],
    setups: Mapping[str, tuple[object, ...]],
    seconds: Mapping[Key, list[float]],
    terms: Terms,
) -> Offer:
    """Return an offer with its ratio to the first offer of its kind."""
    own = _point(offer)
    first = next(one for one in found if _point(one).service == own.service)
    best = _point(first)
    if offer is first:
        return offer

    def figures(one: Offer) -> list[float]:
        point, cost = _point(one), one.cost
        if cost is None or not ranked_by_cost(found):
            return seconds[point.key]
        hourly = (terms.hourly(one.run) or 0.0) / 3.6
        fixed = cost.of_1000.value - hourly * point.seconds_per_image.value
        return [fixed + hourly * each for each in seconds[point.key]]

    ratio = unpaired_ratio(figures(offer), figures(first))
    again = SAME_SETUP if setups[offer.run] == setups[first.run] else ""
    verdict = judge(ratio, unsettled=own.unsettled or best.unsettled or again)
    return offer.model_copy(update={"behind": ratio, "verdict": verdict})
