"""Finds each device's best offer for a buyer's terms, and ranks the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from lantern_accel.device.datasheets import DeviceProfile
from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import (
    Interval,
    NotMeasured,
    Reading,
    Run,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.quality.interval import Verdict, unpaired_ratio
from lantern_accel_profiles.quality.interval import verdict as judge
from lantern_accel_profiles.report.names import CONDITIONS, PROPERTIES, differences, hardware_words
from lantern_accel_profiles.report.points import Cost, Key, Point, Terms
from lantern_accel_profiles.report.writing import as_sentence_list

#: The share of requests that must keep a bound on latency.
IN_TIME = 0.95
#: Samples per strategy below which confidence is low, and from which it may be high.
FEW, MANY = 10, 30
#: Half an interval over its figure up to which confidence may be high.
NARROW = 0.05
NO_METER = "energy: no meter"
Confidence = Literal["low", "medium", "high"]


class Offer(Record):
    """A device's offer for the terms: its best strategy and batch size, or why it has none."""

    run: str
    hardware: str = Field("", description="cores and memory of the device")
    reason: str = Field("", description="why there is no offer; empty: there is one")
    point: Point | None = None
    cost: Cost | None = Field(None, description="None: no amount was given")
    per_kw: Reading = Field(0.0, description="images per second and provisioned kilowatt")
    confidence: Confidence = "low"
    because: list[str] = Field(default_factory=list, description="reasons of the confidence")
    missing: list[str] = Field(default_factory=list, description="what was not measured")
    runs: list[str] = Field(
        default_factory=list, description="the device's runs with the same setup and this point"
    )
    between: float = Field(1.0, description="fastest over slowest of these runs; 1 for one run")
    behind: Interval | None = Field(
        None,
        description="ratio to the first offer of its kind, in speed or in cost",
    )
    verdict: Verdict | NotMeasured | None = Field(
        None, description="on the first offer over this one"
    )


def offers(
    runs: Sequence[Run],
    repeats: Mapping[str, Sequence[str]],
    points: Sequence[Point],
    seconds: Mapping[Key, list[float]],
    terms: Terms,
    profiles: Sequence[DeviceProfile],
) -> list[Offer]:
    """Return each device's offer, the best first, then the devices without an offer.

    ``repeats``: by run, all runs of its device and setup. The best is the cheapest if the costs of all
    offers have the same parts, and otherwise the fastest.
    """
    found: list[Offer] = []
    refused: list[Offer] = []
    for run in runs:
        for service in (False, True):
            mine = [one for one in points if (one.run, one.service) == (run.name, service)]
            if not mine:
                continue
            kept, why = _select(mine, terms)
            alike = [one for one in points if one.run in repeats[run.name]]
            made = [_offer(run, mine, point, runs, alike, terms, profiles) for point in kept]
            if made:
                found.append(min(made, key=lambda one: (bool(_point(one).unsettled), _rank(one))))
            else:
                refused.append(Offer(run=run.name, reason=why))
    found.sort(key=lambda one: -_point(one).images_per_second.value)
    if ranked_by_cost(found):
        found.sort(key=_rank)
    return [_against(one, found, seconds, terms) for one in found] + refused


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


def _offer(
    run: Run,
    mine: Sequence[Point],
    point: Point,
    runs: Sequence[Run],
    alike: Sequence[Point],
    terms: Terms,
    profiles: Sequence[DeviceProfile],
) -> Offer:
    device = run.environment.device
    power = next(
        (one.power_w for one in profiles if one.matches(device.backend, device.name)), None
    )
    per_kw: Reading = not_measured("no datasheet gives the device's power")
    if power is not None:
        per_kw = point.images_per_second.value / (power.value / 1e3 * terms.overhead)
    missing = [] if is_measured(point.joules_per_image) else [NO_METER]
    tails = [p for p, found in point.latency.items() if isinstance(found, str)]
    missing += [f"{' and '.join(tails)}: too few requests"] if tails else []
    most = max(one.batch for one in mine)
    missing.append(f"above {most} at once" if point.service else f"batches above {most}")
    repeats = [one for one in alike if one.key[1:] == point.key[1:]]
    rates = [one.images_per_second.value for one in repeats]
    # Its intervals hold the same point of the device's other runs, too.
    for name in ("images_per_second", "seconds_per_image"):
        own, values = getattr(point, name), [getattr(one, name).value for one in repeats]
        ends = {"low": min(own.low, *values), "high": max(own.high, *values)}
        point = point.model_copy(update={name: own.model_copy(update=ends)})
    word, because = _confidence(run, point, len(repeats), runs)
    return Offer(
        run=run.name,
        hardware=hardware_words(run),
        runs=[one.run for one in repeats],
        between=max(rates) / min(rates),
        point=point,
        cost=terms.cost(run.name, point.seconds_per_image, point.joules_per_image),
        per_kw=per_kw,
        confidence=word,
        because=because,
        missing=missing,
    )


def _confidence(
    run: Run, point: Point, repeats: int, runs: Sequence[Run]
) -> tuple[Confidence, list[str]]:
    """Return the confidence in a device's figures, and its reasons.

    "high" needs two runs of the device that agree, many requests and one setup for all devices.
    """
    quick = ["quick run"] if run.settings.plan.quick else []
    doubts = [] if run.state == "complete" else [f"the run is {run.state}"]
    doubts += [point.unsettled] if point.unsettled else []
    count = f"{repeats} runs" if repeats > 1 else "one run"
    counted = [f"{count} of {point.requests} requests"]
    differ = [name for name, values in differences(runs).items() if name in CONDITIONS]
    differ = [PROPERTIES[name][1].format(PROPERTIES[name][0](run)) for name in differ]
    if len({one.settings.plan.quick for one in runs}) > 1:
        differ += ["full protocol"] if not quick else []
    mixed = [f"{as_sentence_list(differ)}, unlike other runs"] if differ else []
    because = [*quick, *counted, *mixed, *doubts]
    if quick or doubts or point.requests < FEW:
        return "low", because
    rate = point.images_per_second
    narrow = rate.high - rate.low <= 2 * NARROW * rate.value
    sure = narrow and point.requests >= MANY and repeats > 1 and not mixed
    return ("high" if sure else "medium"), because


def _against(
    offer: Offer, found: Sequence[Offer], seconds: Mapping[Key, list[float]], terms: Terms
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
    between = offer.between * first.between
    ratio = ratio.model_copy(update={"low": ratio.low / between, "high": ratio.high * between})
    again = "another run of the first device" if offer.run in first.runs else ""
    verdict = judge(ratio, unsettled=own.unsettled or best.unsettled or again)
    return offer.model_copy(update={"behind": ratio, "verdict": verdict})
