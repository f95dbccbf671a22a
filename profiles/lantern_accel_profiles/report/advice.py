"""The first screen of a report: the device to choose on a buyer's terms, as a sentence and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lantern_accel.strategy.values import AUTO
from lantern_accel_profiles.measure.record import Interval, Reading, is_measured
from lantern_accel_profiles.report.offers import IN_TIME, SAME_SETUP, Offer, ranked_by_cost
from lantern_accel_profiles.report.points import JOULES_PER_KWH, Point, Terms
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
    given = [one for one in section.offers if one.point is not None]
    if not given:
        reasons = "; ".join(f"{one.run}: {one.reason}" for one in section.offers)
        return f"No device is recommended. {reasons or 'Nothing was measured yet'}."
    first = given[0]
    bound = "" if terms.latency_s is None else f"Within {terms.latency_s:g} s per image, "
    rivals = [one for one in given[1:] if _serves(one) == _serves(first)]
    second = next((one for one in rivals if reason(one.verdict) != SAME_SETUP), None)
    if second is None:
        return f"{bound}{first.run} makes {_makes(first, terms)}."
    ratio = times(second.behind or "")
    if second.verdict == "faster":
        cheaper = first.cost is not None and ranked_by_cost(section.offers)
        than = "cheaper than" if cheaper else "the throughput of"
        lead = f"choose {first.run}: {_makes(first, terms)}, {ratio.partition('x')[0]}x {than}"
        return f"{upper(bound + lead)} {second.run}."
    both = f"{first.run} makes {_makes(first, terms)}; {second.run} {_makes(second, terms)}"
    why = verdict_words(str(second.verdict))
    return f"{bound}{first.run} and {second.run} ({ratio}): {why}. {both}."


def _serves(offer: Offer) -> bool:
    return offer.point is not None and offer.point.service


def _makes(offer: Offer, terms: Terms) -> str:
    assert offer.point is not None  # an offer without a reason has one
    rate = f"{number(offer.point.images_per_second.value)} images/s"
    return rate if offer.cost is None else f"{rate}, 1,000 for {_cost_words(offer, terms)}"


def notes(section: ModelSection, terms: Terms) -> list[str]:
    """Return the terms of the table, and what else differs between runs."""
    found = [f"Each device with its best strategy and batch size for {terms.words()}."]
    if section.differences:
        parts = [
            f"{name} ({as_sentence_list(list(dict.fromkeys(values)))})"
            for name, values in section.differences.items()
        ]
        found.append(f"The runs also differ in {as_sentence_list(parts)}.")
    return found


# --- tables -----------------------------------------------------------------------------------


def offers_table(section: ModelSection, terms: Terms) -> ReportTable:
    """Return the table of offers; energy has a column where any device has a meter."""
    points = [one.point for one in section.offers if one.point is not None]
    metered = any(is_measured(point.joules_per_image) for point in points)
    cost = "Cost of 1,000 images" if terms.amounts else "Device time of 1,000 images"
    head = ["Device", "Strategy", "Images/s", "Seconds per request", cost]
    head += ["Images per kWh"] if metered else []
    head += ["Slower than #1 by"] if len(points) > 1 else []
    head += ["Measured", "Not measured"]
    rows = []
    for one in section.offers:
        point = one.point
        if point is None:
            rows.append([one.run, one.reason, *[""] * (len(head) - 2)])
            continue
        # Without the reason of auto's choice.
        auto = f": {point.detail.partition(' (')[0]}" if point.strategy == AUTO else ""
        tail = point.latency[f"p{100 * IN_TIME:.0f}"]
        p95 = f" (p95 {number(tail.value)})" if isinstance(tail, Interval) else ""
        late = f"; {percent(point.in_time)} in time" if point.in_time < 1 else ""
        row = [
            one.run,
            f"{point.strategy}, {point.setting}, {point.fidelity}{auto}",
            interval(point.images_per_second),
            f"{number(point.seconds)}{p95}{late}",
            _cost_words(one, terms),
        ]
        row += [_images_per_kwh(point.joules_per_image)] if metered else []
        row += [_ratio_words(one.behind, one.verdict)] if len(points) > 1 else []
        measured = ", ".join(filter(None, [one.hardware, one.measured]))
        rows.append([*row, measured, "; ".join(one.missing) or "nothing"])
    return ReportTable(head, rows)


def _cost_words(offer: Offer, terms: Terms) -> str:
    if not terms.amounts and offer.point is not None:
        return f"{number(offer.point.seconds_per_image.value / 0.06)} minutes"
    if offer.cost is None:
        return "no cost given"
    words = f"{interval(offer.cost.of_1000, terms.currency)} of {offer.cost.covers}"
    return f"{words}, without {offer.cost.without}" if offer.cost.without else words


def _ratio_words(ratio: Interval | str | None, verdict: str | None) -> str:
    """Return a ratio, with its verdict where that is not the better one; ``first`` without any."""
    if ratio is None:
        return "first"
    said = "" if verdict == "faster" else f", {verdict_words(str(verdict))}"
    return f"{times(ratio)}{said}"


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
        words = "1 (plain decoding)"
        if one.strategy != "vanilla":
            words = f"{one.strategy}: {_ratio_words(one.speedup, one.verdict)}"
        rows.setdefault(one.run, [one.run, str(one.batch)]).append(words)
    head = ["Device", "Batch", *(f"TV {budget:g}" if budget else "exact" for budget in budgets)]
    return ReportTable(head, list(rows.values()))
