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
            kept = [one for one in mine if not _refusal(one, terms)]
            if kept:
                made = (_offer(run, mine, point, terms) for point in kept)
                found.append(min(made, key=lambda one: (bool(_point(one).unsettled), _rank(one))))
            elif mine:
                nearest = max(mine, key=lambda one: _nearness(one, terms))
                refused.append(Offer(run=run.name, reason=_refusal(nearest, terms)))
    found.sort(key=lambda one: -_point(one).images_per_second.value)
    if by_cost := ranked_by_cost(found):
        found.sort(key=_rank)
    firsts = {_point(one).service: one for one in reversed(found)}

    def figures(one: Offer) -> list[float]:
        """Return a device's seconds per image, or what images cost that take these."""
        point, hourly = _point(one), (terms.hourly(one.run) or 0.0) / 3.6
        if one.cost is None or not by_cost:
            return seconds[point.key]
        fixed = one.cost.of_1000.value - hourly * point.seconds_per_image.value
        return [fixed + hourly * each for each in seconds[point.key]]

    for one in found:
        first = firsts[_point(one).service]
        if one is not first:
            same = SAME_SETUP if setups[one.run] == setups[first.run] else ""
            doubt = _point(one).unsettled or _point(first).unsettled or same
            one.behind = unpaired_ratio(figures(one), figures(first))
            one.verdict = judge(one.behind, unsettled=doubt)
    return found + refused


def ranked_by_cost(found: Sequence[Offer]) -> bool:
    """Return whether the costs of all offers have the same parts, and can be compared."""
    parts = {one.cost and one.cost.without for one in found if not one.reason}
    return len(parts) == 1 and None not in parts


def _nearness(point: Point, terms: Terms) -> tuple[bool, bool, float]:
    """Return which of the terms a point meets: its times are believed, its quality, its latency."""
    within = point.moved is not None and point.moved <= terms.tv_budget
    return not point.doubt, within, point.in_time


def _refusal(point: Point, terms: Terms) -> str:
    """Return the first of the terms that a point does not meet; empty: it meets all."""
    believed, within, in_time = _nearness(point, terms)
    if not believed:
        return f"no verdict: {point.doubt}"
    if not within:
        return "no measured strategy has a TV within the bound"
    late = f"at most {100 * in_time:.0f} % of its requests came in time"
    return "" if in_time >= IN_TIME else late


def _point(offer: Offer) -> Point:
    assert offer.point is not None  # an offer without a reason has one
    return offer.point


def _rank(offer: Offer) -> float:
    """Return the key of ranking, the smallest first: the cost, or the seconds per image."""
    if offer.cost is not None:
        return offer.cost.of_1000.value
    return _point(offer).seconds_per_image.value


def _offer(run: Run, mine: Sequence[Point], point: Point, terms: Terms) -> Offer:
    missing = [] if is_measured(point.joules_per_image) else ["energy: no meter"]
    tails = [p for p, found in point.latency.items() if isinstance(found, str)]
    missing += [f"{' and '.join(tails)}: too few requests"] if tails else []
    most = max(one.batch for one in mine)
    missing.append(f"above {most} at once" if point.service else f"batches above {most}")
    measured = ["quick run"] if run.settings.plan.quick else []
    measured.append(f"{point.requests} requests")
    measured += [] if run.state == "complete" else [f"the run is {run.state}"]
    return Offer(
        run=run.name,
        hardware=hardware_words(run),
        point=point,
        cost=terms.cost(run.name, point.seconds_per_image, point.joules_per_image),
        measured=", ".join(filter(None, [*measured, point.unsettled])),
        missing=missing,
    )
