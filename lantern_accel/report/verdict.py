"""The verdict of a report: whether drafting pays on a device, how sure that is, and its sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lantern_accel.measure.record import Cell, Distance, Interval, Quality, Run, is_measured
from lantern_accel.quality.interval import unpaired_ratio
from lantern_accel.quality.interval import verdict as judge
from lantern_accel.report.filing import disturbances, unpublishable
from lantern_accel.report.names import differences
from lantern_accel.report.offers import Terms, cell_of
from lantern_accel.report.record import (
    Answer,
    Answers,
    Comparison,
    ModelSection,
    Pays,
    RunSummary,
    Standing,
)
from lantern_accel.report.rows import NO_BASE, Row, why_unsettled
from lantern_accel.report.writing import (
    as_sentence_list,
    interval,
    number,
    percent,
    reason,
    size,
    times,
    upper,
    verdict_words,
)
from lantern_accel.strategy.values import AUTO

#: Samples per strategy below which confidence is low, and from which it may be high.
FEW, MANY = 10, 30
#: Half an interval over its figure up to which confidence may be high.
NARROW = 0.05
QUESTION = "Does drafting pay here?"
NO_DIFFERENCE = "no difference"
#: How an answer begins.
LEADS = {
    "yes": "Yes, with",
    "for a price": "Only for a price, with",
    "not shown": "Not shown. The nearest is",
    "no": "No. The nearest is",
    "unknown": "Not known. The nearest is",
}
#: A permutation test's p-value below which images are called different.
LEVEL = 0.05

# --- facts ----------------------------------------------------------------------


def first_setting(rows: Sequence[Row]) -> tuple[int, float] | None:
    """Return the batch size and temperature that a first screen is about; None without rows.

    The smallest batch that all runs have, or else the smallest of all; the temperature nearest to 1.
    """
    by_run: dict[str, set[tuple[int, float]]] = {}
    for row in rows:
        by_run.setdefault(row.run, set()).add((row.batch, row.temperature))
    if not by_run:
        return None
    shared = set.intersection(*by_run.values()) or set.union(*by_run.values())
    return min(shared, key=lambda one: (abs(one[1] - 1), one[0]))


def at_setting(rows: Sequence[Row], run: str) -> list[Row]:
    """Return a run's rows of the first screen, in the order in which they were measured."""
    mine = [row for row in rows if row.run == run]
    for choice in (first_setting(rows), first_setting(mine)):
        here = [row for row in mine if (row.batch, row.temperature) == choice]
        if here:
            return here
    return []


def answer_all(runs: Sequence[Run], rows: Sequence[Row]) -> Answers:
    """Answer for every run of one model, and put the devices in order."""
    known = [run for run in runs if at_setting(rows, run.name)]
    return Answers(
        answers=[answer(run, rows) for run in known],
        standings=_standings(known, rows),
        differences=differences(known) if len(known) > 1 else {},
    )


def answer(run: Run, rows: Sequence[Row]) -> Answer:
    """Answer for one run, which has rows."""
    here = at_setting(rows, run.name)
    plain = next((row for row in here if row.strategy == "vanilla"), None)
    others = [row for row in here if row.strategy != "vanilla"]
    compared = [row for row in others if isinstance(row.speedup, Interval)]
    faster = sorted((r for r in compared if r.verdict == "faster"), key=_speedup, reverse=True)
    exact = [row for row in faster if not row.relaxed]
    relaxed = [row for row in faster if row.relaxed]
    # Where none is faster, the nearest: one with a verdict, if there is one.
    nearest = sorted(compared, key=lambda row: (row.verdict in _WORDS, _speedup(row)), reverse=True)
    best = next(iter(exact or relaxed or nearest), None)
    still = relaxed[0] if exact and relaxed and _speedup(relaxed[0]) > _speedup(exact[0]) else None
    names = {word: [r.strategy for r in compared if r.verdict == word] for word in _WORDS}
    pays: dict[Pays, list[Any]] = {  # the first that has something decides
        "yes": exact,
        "for a price": relaxed,
        "not shown": names["ambiguous"],
        "no": names["slower"] + names["same"],
    }
    confidence, because = _confidence(run, here, best)
    return Answer(
        run=run.name,
        batch=here[0].batch,
        temperature=here[0].temperature,
        pays=next((word for word, found in pays.items() if found), "unknown"),
        best=None if best is None else best.strategy,
        priced=None if still is None else still.strategy,
        plain_seconds=NO_BASE if plain is None else plain.seconds_per_image,
        best_seconds=None if best is None else best.seconds_per_image,
        unshown=names["ambiguous"],
        same=names["same"],
        slower=names["slower"],
        unjudged=[r.strategy for r in others if r.verdict not in _WORDS],
        confidence=confidence,
        because=because,
        untested=_list_untested(run, rows),
        unpublishable=unpublishable(run),
    )


_WORDS = ("faster", "ambiguous", "same", "slower")


def _speedup(row: Row) -> float:
    return row.speedup.value if isinstance(row.speedup, Interval) else 0.0


def _confidence(
    run: Run, here: Sequence[Row], best: Row | None
) -> tuple[Literal["low", "medium", "high"], list[str]]:
    """Return how sure an answer is, and what it rests on."""
    samples = min(row.samples for row in here)
    because = ["quick run"] if run.settings.plan.quick else []
    because += [f"{samples} samples of each", f"batch {here[0].batch}"]
    compared = sum(row.strategy != "vanilla" for row in here)
    if best is not None and best.verdict == "faster" and compared > 1:
        because.append(f"the best of {compared}, so perhaps lucky")
    doubts = [] if run.state == "complete" else [f"the run is {run.state}"]
    if not all(row.settled for row in here):
        doubts.append("warm-up did not settle")
    doubts += disturbances(run)
    because += doubts
    if doubts or run.settings.plan.quick or samples < FEW:
        return "low", because
    speed = None if best is None else best.speedup
    narrow = isinstance(speed, Interval) and speed.high - speed.low <= 2 * NARROW * speed.value
    return ("high" if narrow and samples >= MANY else "medium"), because


def _list_untested(run: Run, rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row.run == run.name]
    found = [] if any(row.strategy == AUTO for row in mine) else [AUTO]
    found.append(f"batches above {max(row.batch for row in mine)}")
    return found + ["other devices"] * (len({row.device for row in rows}) == 1)


def _standings(runs: Sequence[Run], rows: Sequence[Row]) -> list[Standing]:
    """Hold every device against the slowest; empty where fewer than two can be compared."""
    found: list[tuple[Row, Cell]] = []
    choice = first_setting(rows)
    for run in runs:
        here = [r for r in at_setting(rows, run.name) if (r.batch, r.temperature) == choice]
        exact = [row for row in here if row.exact]
        if exact:
            row = max(exact, key=lambda one: (one.settled, one.tokens_per_second.value))
            found.append((row, cell_of(run, row)))
    if not found:
        return []
    found.sort(key=lambda one: -one[0].tokens_per_second.value)
    slowest, base = found.pop()
    ratios = [unpaired_ratio(cell.rates, base.rates) for _, cell in found]
    return [
        Standing(
            run=row.run,
            strategy=row.strategy,
            against=slowest.run,
            against_strategy=slowest.strategy,
            batch=row.batch,
            ratio=ratio,
            verdict=judge(ratio, unsettled=why_unsettled(cell, base)),
        )
        for (row, cell), ratio in zip(found, ratios, strict=True)
    ]


# --- sentences ------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceSentences:
    """One device's answer in sentences, with the rows of its table."""

    run: str
    short: str
    """Yes, with scd: 1.56x (1.27 to 1.76), exact."""
    lines: list[str]
    warnings: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class FirstScreen:
    """The first screen of one model."""

    opening: list[str]
    """How many times one device is another, and what else differs; empty for a single run."""
    devices: list[DeviceSentences]
    prices: list[str]
    """What relaxation does to images, a sentence a strategy."""
    warnings: list[str]
    """Of runs that have no row yet."""


def first_screen(comparison: Comparison, section: ModelSection) -> FirstScreen:
    """Return a model's first screen; only measured rows are looked at."""
    first = section.first
    answered = {one.run for one in first.answers}
    return FirstScreen(
        opening=opening_lines(first),
        devices=[_sentences(comparison, section, one) for one in first.answers],
        prices=_price_lines(section),
        warnings=[
            _incomplete_words(run)
            for run in comparison.runs
            if run.settings.model == section.model
            and run.name not in answered
            and run.state != "complete"
        ],
    )


# --- several devices --------------------------------------------------------------------------


def opening_lines(first: Answers) -> list[str]:
    """Say how many times one device is another, and what else differs between their runs."""
    if not first.standings:
        return []
    words = "; ".join(map(_standing_words, first.standings))
    # A name is written as it was given, at the beginning of a sentence too.
    lines = [f"{upper(words) if words.startswith(NO_DIFFERENCE) else words}."]
    last = first.standings[-1]
    ran = [(one.strategy, one.run) for one in first.standings]
    ran.append((last.against_strategy, last.against))
    if len({strategy for strategy, _ in ran}) == 1:
        how = f"all with {last.strategy}, the fastest exact strategy of each"
    else:
        how = "each with its fastest exact strategy: "
        how += as_sentence_list([f"{strategy} on {run}" for strategy, run in ran])
    lines.append(f"At batch {last.batch}, {how}.")
    if first.differences:
        parts = [
            f"{name} ({as_sentence_list(list(dict.fromkeys(values)))})"
            for name, values in first.differences.items()
        ]
        lines.append(f"The runs also differ in {as_sentence_list(parts)}.")
    return lines


def _standing_words(one: Standing) -> str:
    ratio, run, against = times(one.ratio), one.run, one.against
    if one.verdict == "ambiguous":
        return f"{NO_DIFFERENCE} between {run} and {against} was shown for this work ({ratio})"
    if one.verdict == "same":
        return f"{run} is as fast as {against} for this work ({ratio})"
    value, _, span = ratio.partition("x")
    text = f"{run} is {value} times {against} for this work{span}"
    return text + (f", {verdict_words(one.verdict)}" if reason(one.verdict) else "")


# --- one device -------------------------------------------------------------------------------


def _sentences(comparison: Comparison, section: ModelSection, one: Answer) -> DeviceSentences:
    rows = at_setting(section.rows, one.run)
    run = next(run for run in comparison.runs if run.name == one.run)
    best = _row(rows, one.best)
    plain = _row(rows, "vanilla")
    shown = best if best is not None and one.pays in ("yes", "for a price") else None
    trust = f"Confidence: {one.confidence} ({', '.join(one.because)})."
    lines = [
        _work_words(plain, shown, rows),
        _rest_words(one, rows),
        f"{trust} Not tested: {', '.join(one.untested)}.",
        f"Not for publication: {'; '.join(one.unpublishable)}." if one.unpublishable else "",
    ]
    warnings = [] if run.state == "complete" else [_incomplete_words(run)]
    return DeviceSentences(
        run.name, _short_answer(one, rows), [line for line in lines if line], warnings, rows
    )


def _row(rows: Sequence[Row], name: str | None) -> Row | None:
    return next((row for row in rows if row.strategy == name), None)


def speed_words(row: Row) -> str:
    """Say how fast a row is: ``lantern++: 1.13x (0.91 to 1.32), not shown to be faster``."""
    verdict = verdict_words(row.verdict)
    words = f"{row.strategy}: {times(row.speedup)}"
    if verdict == "faster":
        return f"{words}, {row.fidelity}"
    return f"{words}, {verdict}" + (f"; it {row.fidelity}" if row.relaxed or row.rounding else "")


def _short_answer(one: Answer, rows: Sequence[Row]) -> str:
    best = _row(rows, one.best)
    if best is None:
        if all(row.strategy == "vanilla" for row in rows):
            return "Not known: only plain decoding was measured."
        return "Not known: no strategy can be held against plain decoding."
    still = _row(rows, one.priced) if one.pays == "yes" else None
    more = f" Faster still, for a price: {speed_words(still)}." if still is not None else ""
    return f"{LEADS[one.pays]} {speed_words(best)}.{more}"


def _work_words(plain: Row | None, shown: Row | None, rows: Sequence[Row]) -> str:
    """Say what an image takes: seconds, memory, energy."""
    first = shown or plain or rows[0]
    base = plain if shown is not None else None
    memory = energy = None
    if is_measured(first.peak_bytes):
        memory = size(first.peak_bytes)
        if base is not None and is_measured(base.peak_bytes):
            memory += f" instead of {size(base.peak_bytes)}"
    if is_measured(first.joules_per_image):
        energy = f"{number(first.joules_per_image)} J per image"
        if base is not None and is_measured(base.joules_per_image):
            energy += f" instead of {number(base.joules_per_image)}"
    took = _time_words(first, base)
    return f"{took}; memory: {memory or 'not measured'}; energy: {energy or 'no meter'}."


def _time_words(row: Row, base: Row | None) -> str:
    if not isinstance(row.seconds_per_image, Interval):
        speed = f"{number(row.tokens_per_second.value)} tokens per second"
        if base is None:
            return f"Decoding makes {speed} with {row.strategy}"
        return f"Decoding makes {speed} instead of {number(base.tokens_per_second.value)}"
    text = f"An image takes {number(row.seconds_per_image.value)} s"
    if base is None:
        return f"{text} with {'plain decoding' if row.strategy == 'vanilla' else row.strategy}"
    if isinstance(base.seconds_per_image, Interval):
        return f"{text} instead of {number(base.seconds_per_image.value)} s"
    return text


def _rest_words(one: Answer, rows: Sequence[Row]) -> str:
    """Say what was found of the strategies that the answer does not name."""
    others = [row for row in rows if row.strategy not in (one.best, one.priced)]
    also = [row for row in others if row.verdict == "faster"]
    found = {
        "Also faster": [row.strategy for row in also if not row.relaxed],
        "Also faster, for a price": [row.strategy for row in also if row.relaxed],
        "Not shown to be faster": one.unshown,
        "As fast as plain decoding": one.same,
        "Slower": one.slower,
    }
    rest = {label: [n for n in names if n != one.best] for label, names in found.items()}
    parts = [f"{label}: {', '.join(names)}." for label, names in rest.items() if names]
    without: dict[str, list[str]] = {}
    for row in rows:
        if row.strategy in one.unjudged and row.strategy != one.best:
            without.setdefault(reason(row.verdict), []).append(row.strategy)
    parts += [f"No verdict on {as_sentence_list(names)}: {why}." for why, names in without.items()]
    return " ".join(parts)


def _incomplete_words(run: RunSummary) -> str:
    return f"Run {run.name} is {run.state}, not complete; `{run.command} --resume` goes on."


# --- prices -----------------------------------------------------------------------------------


def _price_lines(section: ModelSection) -> list[str]:
    """Say for each relaxed strategy what it moves, and whether its images are shown to differ."""
    found: dict[str, dict[str, Quality]] = {}
    several = len({row.temperature for row in section.rows}) > 1
    for row in section.rows:
        if isinstance(row.price, Quality):
            where = f"{row.run} at T {row.temperature:g}" if several else row.run
            found.setdefault(row.strategy, {}).setdefault(where, row.price)
    return [f"{strategy}: {_price_words(runs)}" for strategy, runs in found.items()]


def _price_words(runs: Mapping[str, Quality]) -> str:
    prices = list(runs.values())
    moved = [q.total_variation.value for q in prices if isinstance(q.total_variation, Interval)]
    text = f"moves {_range_words(moved, percent)} of a token's probability; " if moved else ""
    known = {run: q.distance for run, q in runs.items() if isinstance(q.distance, Distance)}
    if not known:
        why = reason(prices[0].distance)
        missing = f"was not measured: {why}" if why else prices[0].distance
        return f"{text}the distance of its images {missing}."
    far = [run for run, d in known.items() if d.p_value < LEVEL]
    verdict = "were not shown to differ from vanilla's"
    verdict = "are farther from vanilla's than chance explains" if far else verdict
    weakest = max(known, key=lambda run: known[run].detectable)
    limits = detection_limit(known[weakest], runs[weakest].images)
    if len(runs) > 1:
        where = f" on {as_sentence_list(far)}" if far else ""
        measured = f"{len(known)} of {len(runs)} runs measured it"
        return f"{text}its images {verdict}{where}; {measured}. {limits}"
    (d,) = known.values()
    return (
        f"{text}its {prices[0].images} images {verdict} ({d.metric} {interval(d.value)}; "
        f"p = {d.p_value:.2g}). {limits}"
    )


def detection_limit(distance: Distance, images: int) -> str:
    """Say what so many images cannot show."""
    return (
        f"With {images} images, differences below about {number(distance.detectable)} would often be "
        "missed."
    )


def projection_error(section: ModelSection) -> str:
    """Say how far the roofline model is from what was measured; empty where nothing can be said."""
    factors = [e.factor for e in section.errors if e.limits.startswith("ceilings")]
    if not factors:
        return ""
    return (
        f"On the measured devices the roofline model promises {_range_words(factors, number)} times "
        "what was measured, so read projections with that factor in mind."
    )


def _range_words(values: Sequence[float], written: Callable[[float], str]) -> str:
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low} to {high}"


def pricing_terms(terms: Terms) -> str:
    """Say what was asked for: quality, latency, prices."""
    share, seconds = 100 * terms.tv_budget, terms.latency_s
    exact = f"strategies that move {share:g} % of a token's probability at most"
    long = "any length" if seconds is None else f"{seconds:g} s at most"
    prices = "prices per hour as given" if terms.prices else "no price given"
    return f"{exact if share else 'exact decoding'}, requests of {long}, {prices}"
