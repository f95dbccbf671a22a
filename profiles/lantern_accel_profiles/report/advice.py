"""The first screen of a report: the device to choose on a buyer's terms, as a sentence and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lantern_accel.strategy.values import AUTO
from lantern_accel_profiles.measure.record import Interval, Reading, is_measured
from lantern_accel_profiles.report.offers import (
    IN_TIME,
    NO_METER,
    SAME_SETUP,
    Offer,
    ranked_by_cost,
)
from lantern_accel_profiles.report.points import JOULES_PER_KWH, Cost, Point, Terms
from lantern_accel_profiles.report.record import ModelSection
from lantern_accel_profiles.report.writing import (
    as_sentence_list,
    interval,
    number,
    percent,
    reason,
    times,
    upper,
    verdict_words,
)


class ReportTable(NamedTuple):
    """A table as text; a row has a cell for each column of the head."""

    head: list[str]
    rows: list[list[str]]


# --- sentences --------------------------------------------------------------------------------


def headline(section: ModelSection, terms: Terms) -> str:
    """Return which device to choose on the terms, or why none is recommended."""
    given = [one for one in section.offers if not one.reason]
    bound = "" if terms.latency_s is None else f"Within {terms.latency_s:g} s per image, "
    # Only requests to a service wait in a queue. The sentence is about the larger group.
    groups = [[one for one in given if _serves(one) == kind] for kind in map(_serves, given)]
    spoken = max(groups, key=len, default=[])
    wait = "not compared, since requests to a service wait in a queue"
    apart = [f"{one.run}: {one.reason or wait}" for one in section.offers if one not in spoken]
    words = "; ".join(apart[:2]) + (f"; and {len(apart) - 2} more" if len(apart) > 2 else "")
    if not spoken:
        return f"No device is recommended. {words or 'Nothing was measured yet'}."
    first = spoken[0]
    others = [one for one in spoken[1:] if reason(one.verdict) != SAME_SETUP]
    if not others:
        only = f"{bound}{first.run} makes {_makes(first, terms)}."
        return f"{only} {words}." if words else only
    second = others[0]
    both = f"{first.run} makes {_makes(first, terms)}; {second.run} {_makes(second, terms)}"
    if why := reason(second.verdict):
        return f"{bound}{first.run} and {second.run} are not compared: {why}. {both}."
    if second.verdict != "faster":
        none = f"{bound}no difference was shown between {first.run} and {second.run}"
        return f"{upper(none)} ({times(second.behind or '')}): {both}."
    choice = upper(f"{bound}choose {first.run}")
    quick = [one for one in (first, second) if one.measured.startswith("quick run")]
    sure = f" {quick[0].run} was measured by a {quick[0].measured}." if quick else ""
    ratio = times(second.behind or "").partition("x")[0]
    if first.cost is not None and ranked_by_cost(section.offers):
        return (
            f"{choice}: 1,000 images cost {_amount(first.cost, terms)}; on {second.run} they cost "
            f"{ratio} times as much.{sure}"
        )
    return f"{choice}: {_rate(first)}, {ratio}x the throughput of {second.run}.{sure}"


def _serves(offer: Offer) -> bool:
    return offer.point is not None and offer.point.service


def _rate(offer: Offer) -> str:
    assert offer.point is not None  # an offer without a reason has one
    return f"{number(offer.point.images_per_second.value)} images/s"


def _makes(offer: Offer, terms: Terms) -> str:
    cost = "" if offer.cost is None else f", 1,000 for {_amount(offer.cost, terms)}"
    return f"{_rate(offer)}{cost}"


def _amount(cost: Cost, terms: Terms) -> str:
    words = f"{number(cost.of_1000.value)} {terms.currency}".rstrip()
    return f"{words} without {cost.without.partition(':')[0]}" if cost.without else words


def notes(section: ModelSection, terms: Terms) -> list[str]:
    """Return the terms of the table, what else differs between runs, and what was not measured."""
    found = [f"Each device with its best strategy and batch size for {terms.words()}."]
    if section.differences:
        parts = [
            f"{name} ({as_sentence_list(list(dict.fromkeys(values)))})"
            for name, values in section.differences.items()
        ]
        found.append(f"The runs also differ in {as_sentence_list(parts)}.")
    bare = [one.run for one in section.offers if NO_METER in one.missing]
    if bare:
        cost = ", cost of power" if terms.power is not None else ""
        which = as_sentence_list([section.letters[run] for run in bare])
        of = "" if len(bare) == len(section.offers) else f" of {which}"
        found.append(f"Images per kWh{cost}{of}: not measured (no energy meter).")
    return found


# --- tables -----------------------------------------------------------------------------------


def offers_table(section: ModelSection, terms: Terms) -> ReportTable:
    """Return the table of offers, with a column for each figure that any device has."""
    given = [one for one in section.offers if one.point is not None]
    points = [one.point for one in given if one.point is not None]
    metered = any(is_measured(point.joules_per_image) for point in points)
    head = ["Device", "Strategy", "Images/s", "Seconds per request"]
    head += ["Cost of 1,000 images" if terms.amounts else "Device time of 1,000 images"]
    head += ["Images per kWh"] if metered else []
    head += ["Slower than #1 by"] if len(given) > 1 else []
    head += ["Measured", "Not measured"]
    rows = []
    for one in section.offers:
        point = one.point
        if point is None:
            rows.append([_device(one, section), one.reason, *[""] * (len(head) - 2)])
            continue
        kept = (
            "" if point.in_time == 1 else f"; {percent(point.in_time)} within {terms.latency_s:g} s"
        )
        row = [
            _device(one, section),
            f"{point.strategy}, {point.setting}, {point.fidelity}{_auto_words(point)}",
            interval(point.images_per_second),
            _seconds_words(point) + kept,
            _cost_words(one, terms),
        ]
        row += [_images_per_kwh(point.joules_per_image)] if metered else []
        row += [_behind_words(one)] if len(given) > 1 else []
        rows.append([*row, one.measured, "; ".join(one.missing) or "nothing"])
    return ReportTable(head, rows)


def _device(offer: Offer, section: ModelSection) -> str:
    """Return a device's letter, name, cores and memory."""
    words = f"{section.letters[offer.run]}: {offer.run}" if len(section.letters) > 1 else offer.run
    return f"{words}, {offer.hardware}" if offer.hardware else words


def _auto_words(point: Point) -> str:
    """Return what auto decoded with, without its reason."""
    words = point.detail.partition(" (")[0]
    return f": {words}" if point.strategy == AUTO and words else ""


def _seconds_words(point: Point) -> str:
    """Return the median, and the percentile that a bound on latency applies to, if measured."""
    tail = point.latency[f"p{100 * IN_TIME:.0f}"]
    words = number(point.seconds)
    return f"{words} (p95 {number(tail.value)})" if isinstance(tail, Interval) else words


def _cost_words(offer: Offer, terms: Terms) -> str:
    if not terms.amounts and offer.point is not None:
        hours = offer.point.seconds_per_image.value / 3.6
        return f"{number(60 * hours, 2)} minutes" if hours < 1 else f"{number(hours, 2)} hours"
    if offer.cost is None:
        return "no cost given"
    words = f"{interval(offer.cost.of_1000, terms.currency)} of {offer.cost.covers}"
    return f"{words}, without {offer.cost.without}" if offer.cost.without else words


def _behind_words(offer: Offer) -> str:
    if offer.behind is None:
        return "first of the services" if _serves(offer) else "first"
    said = "" if offer.verdict == "faster" else f", {verdict_words(str(offer.verdict))}"
    return f"{times(offer.behind)}{said}"


def _images_per_kwh(joules: Reading) -> str:
    return number(JOULES_PER_KWH / joules) if is_measured(joules) and joules else reason(joules)


def points_table(points: Sequence[Point], many_temperatures: bool) -> ReportTable:
    """Return the points of the plot as a table, the fastest of each device first."""
    head = ["Device", "Strategy", "Images/s", "Seconds per request", "p95, s", "Fidelity", "Remark"]
    order = list(dict.fromkeys(one.run for one in points))
    ranked = sorted(points, key=lambda one: (order.index(one.run), -one.images_per_second.value))
    rows = []
    for one in ranked:
        at = f", T {one.temperature:g}" if many_temperatures else ""
        remark = f"no verdict: {one.doubt}" if one.doubt else "" if one.front else "dominated"
        if is_measured(one.first_partial_s):
            remark += f" first partial image after {number(one.first_partial_s)} s"
        rows.append(
            [
                one.run,
                f"{one.strategy}, {one.setting}{at}",
                interval(one.images_per_second),
                interval(one.latency["p50"]),
                interval(one.latency["p95"]),
                one.fidelity,
                remark.strip(),
            ]
        )
    return ReportTable(head, rows)


def equal_table(section: ModelSection) -> ReportTable:
    """Return each device's speed-up within each budget of total variation."""
    budgets = list(dict.fromkeys(one.budget for one in section.equal_quality))
    rows: dict[str, list[str]] = {}
    for one in section.equal_quality:
        if one.strategy == "vanilla":
            words = "1 (plain decoding)"
        elif why := reason(one.verdict):
            words = f"no verdict: {why}"
        else:
            said = "" if one.verdict == "faster" else f", {verdict_words(one.verdict)}"
            words = f"{times(one.speedup)} {one.strategy}{said}"
        rows.setdefault(one.run, [f"{one.run}, batch {one.batch}"]).append(words)
    if all(len(set(cells[1:])) == 1 for cells in rows.values()):
        most = f"TV of at most {max(budgets, default=0.0):g}, and exact"
        return ReportTable(["Device", most], [cells[:2] for cells in rows.values()])
    head = ["Device", *(f"TV {budget:g}" if budget else "exact" for budget in budgets)]
    return ReportTable(head, list(rows.values()))
