"""The verdict of a report: whether drafting pays on a device, how sure that is, and its sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lantern_accel.measure.record import Cell, Distance, Interval, Quality, Run, is_measured
from lantern_accel.quality.interval import unpaired_ratio
from lantern_accel.quality.interval import verdict as judge
from lantern_accel.report.filing import disturbances, publication_faults
from lantern_accel.report.names import differences
from lantern_accel.report.offers import Offer, Terms, cell_of
from lantern_accel.report.record import Answer, Answers, Comparison, ModelSection, Standing
from lantern_accel.report.rows import Row, seconds_of, why_unjudged
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
#: What is said of the strategies that an answer does not name, by their verdict.
ALSO = {
    "faster": "Also faster",
    "ambiguous": "Not shown to be faster",
    "same": "As fast as plain decoding",
    "slower": "Slower",
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
        if here := [row for row in mine if (row.batch, row.temperature) == choice]:
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
    compared = [r for r in here if r.strategy != "vanilla" and isinstance(r.speedup, Interval)]
    # Where none is faster, the nearest: one with a verdict, if there is one.
    compared.sort(key=lambda row: (row.verdict in ALSO, _speedup(row)), reverse=True)
    faster = [row for row in compared if row.verdict == "faster"]
    exact = [row for row in faster if not row.relaxed]
    best = next(iter(exact or faster or compared), None)
    still = faster[0] if exact and faster[0].relaxed else None
    verdicts = {row.verdict for row in compared}
    pays: Literal["yes", "for a price", "not shown", "no", "unknown"] = "unknown"
    if faster:
        pays = "yes" if exact else "for a price"
    elif "ambiguous" in verdicts:
        pays = "not shown"
    elif verdicts & {"same", "slower"}:
        pays = "no"
    confidence, because = _confidence(run, here, best)
    mine = [row for row in rows if row.run == run.name]
    untested = [] if any(row.strategy == AUTO for row in mine) else [AUTO]
    untested.append(f"batches above {max(row.batch for row in mine)}")
    return Answer(
        run=run.name,
        batch=here[0].batch,
        temperature=here[0].temperature,
        pays=pays,
        best=None if best is None else best.strategy,
        priced=None if still is None else still.strategy,
        confidence=confidence,
        because=because,
        untested=untested + ["other devices"] * (len({row.device for row in rows}) == 1),
        unpublishable=publication_faults(run),
    )


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
    doubts += [] if all(row.settled for row in here) else ["warm-up did not settle"]
    doubts += disturbances(run)
    because += doubts
    if doubts or run.settings.plan.quick or samples < FEW:
        return "low", because
    speed = None if best is None else best.speedup
    narrow = isinstance(speed, Interval) and speed.high - speed.low <= 2 * NARROW * speed.value
    return ("high" if narrow and samples >= MANY else "medium"), because


def _standings(runs: Sequence[Run], rows: Sequence[Row]) -> list[Standing]:
    """Hold every device against the slowest; empty where fewer than two can be compared."""
    found: list[tuple[Row, Cell]] = []
    choice = first_setting(rows)
    for run in runs:
        here = [r for r in at_setting(rows, run.name) if (r.batch, r.temperature) == choice]
        if exact := [row for row in here if row.exact]:
            row = max(exact, key=lambda one: (one.settled, _rate(one)))
            found.append((row, cell_of(run, row)))
    if not found:
        return []
    found.sort(key=lambda one: -_rate(one[0]))
    slowest, base = found.pop()
    ratios = [unpaired_ratio(*seconds_of(base, cell)) for _, cell in found]
    return [
        Standing(
            run=row.run,
            strategy=row.strategy,
            against=slowest.run,
            against_strategy=slowest.strategy,
            batch=row.batch,
            ratio=ratio,
            verdict=judge(ratio, unsettled=why_unjudged(cell, base)),
        )
        for (row, cell), ratio in zip(found, ratios, strict=True)
    ]


def _rate(row: Row) -> float:
    """Return a row's images per second; its tokens per second where requests were not timed whole."""
    whole = row.images_per_second
    return whole.value if isinstance(whole, Interval) else row.tokens_per_second.value


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
    """What relaxation does to images, a sentence a strategy and run."""
    warnings: list[str]
    """Of runs that have no row yet."""


def first_screen(comparison: Comparison, section: ModelSection) -> FirstScreen:
    """Return a model's first screen; only measured rows are looked at."""
    first = section.first
    answered = {one.run for one in first.answers}
    mine = [run for run in comparison.runs if run.settings.model == section.model]
    incomplete = {
        run.name: f"Run {run.name} is {run.state}, not complete; `{run.command} --resume` goes on."
        for run in mine
        if run.state != "complete"
    }
    temperatures = {row.temperature for row in section.rows}
    return FirstScreen(
        opening=_opening(first),
        devices=[
            DeviceSentences(
                one.run,
                _short_answer(one, rows),
                [line for line in _lines(one, rows, section.offers, comparison.terms) if line],
                [incomplete[one.run]] if one.run in incomplete else [],
                rows,
            )
            for one in first.answers
            if (rows := at_setting(section.rows, one.run))
        ],
        prices=[
            f"{row.strategy}{f' on {row.run}' if len(mine) > 1 else ''}"
            f"{f' at T {row.temperature:g}' if len(temperatures) > 1 else ''}: "
            f"{_price_words(row.price)}"
            for row in _priced_rows(section.rows)
            if isinstance(row.price, Quality)
        ],
        warnings=[text for name, text in incomplete.items() if name not in answered],
    )


def _opening(first: Answers) -> list[str]:
    """Say how many times one device is another, and what else differs between their runs."""
    if not first.standings:
        return []
    words = "; ".join(map(_standing_words, first.standings))
    # A name is written as it was given, at the beginning of a sentence too.
    lines = [f"{upper(words) if words.startswith(NO_DIFFERENCE) else words}."]
    last = first.standings[-1]
    ran = [(one.strategy, one.run) for one in first.standings]
    ran.append((last.against_strategy, last.against))
    how = f"all with {last.strategy}, the fastest exact strategy of each"
    if len({strategy for strategy, _ in ran}) > 1:
        pairs = as_sentence_list([f"{strategy} on {run}" for strategy, run in ran])
        how = f"each with its fastest exact strategy: {pairs}"
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
    if why := reason(one.verdict):
        return f"{run} and {against} are not compared: {why}"
    if one.verdict == "ambiguous":
        return f"{NO_DIFFERENCE} between {run} and {against} was shown for this work ({ratio})"
    if one.verdict == "same":
        return f"{run} is as fast as {against} for this work ({ratio})"
    value, _, span = ratio.partition("x")
    return f"{run} is {value} times {against} for this work{span}"


def _row(rows: Sequence[Row], name: str | None) -> Row | None:
    return next((row for row in rows if row.strategy == name), None)


def _speed_words(row: Row) -> str:
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
    still = _row(rows, one.priced)
    more = "" if still is None else f" Faster still, for a price: {_speed_words(still)}."
    return f"{LEADS[one.pays]} {_speed_words(best)}.{more}"


def _lines(one: Answer, rows: Sequence[Row], offers: Sequence[Offer], terms: Terms) -> list[str]:
    """Say what an image takes and costs, what other strategies did, and how sure that is."""
    plain, best = _row(rows, "vanilla"), _row(rows, one.best)
    shown = best if one.pays in ("yes", "for a price") else None
    return [
        _work_words(shown or plain or rows[0], plain if shown is not None else None),
        *(
            f"1,000 images cost {interval(offer.cost_of_1000, terms.currency)} with "
            f"{offer.strategy} at batch {offer.batch}."
            for offer in offers
            if offer.run == one.run and offer.cost_of_1000 is not None
        ),
        _rest_words([row for row in rows if row.strategy not in (one.best, one.priced, "vanilla")]),
        f"Confidence: {one.confidence} ({', '.join(one.because)}). "
        f"Not tested: {', '.join(one.untested)}.",
        f"Not for publication: {'; '.join(one.unpublishable)}." if one.unpublishable else "",
    ]


def _work_words(first: Row, base: Row | None) -> str:
    """Say what an image takes, and instead of what: seconds, memory, energy."""

    def both(name: str, written: Callable[[float], str], unit: str, without: str) -> str:
        own, other = (None if row is None else getattr(row, name) for row in (first, base))
        if not is_measured(own):
            return without
        instead = f" instead of {written(other)}" if is_measured(other) else ""
        return f"{written(own)}{unit}{instead}"

    whole = isinstance(first.seconds_per_image, Interval)
    figures = [
        number(found.value)
        for row in (first, base)
        if row is not None
        and isinstance(found := row.seconds_per_image if whole else row.tokens_per_second, Interval)
    ]
    text = (
        f"An image takes {figures[0]} s"
        if whole
        else f"Decoding makes {figures[0]} tokens per second"
    )
    if base is None:
        text += f" with {'plain decoding' if first.strategy == 'vanilla' else first.strategy}"
    elif len(figures) > 1:
        text += f" instead of {figures[1]}{' s' if whole else ''}"
    memory = both("peak_bytes", size, "", "not measured")
    energy = both("joules_per_image", number, " J per image", "no meter")
    return f"{text}; memory: {memory}; energy: {energy}."


def _rest_words(others: Sequence[Row]) -> str:
    """Say what was found of the strategies that the answer does not name."""
    groups: dict[str, list[str]] = {}
    for verdict, words in ALSO.items():
        for row in others:
            if row.verdict == verdict:
                price = ", for a price" if verdict == "faster" and row.relaxed else ""
                groups.setdefault(words + price, []).append(row.strategy)
    parts = [f"{words}: {', '.join(names)}." for words, names in groups.items()]
    without: dict[str, list[str]] = {}
    for row in others:
        if row.verdict not in ALSO:
            without.setdefault(reason(row.verdict), []).append(row.strategy)
    parts += [f"No verdict on {as_sentence_list(names)}: {why}." for why, names in without.items()]
    return " ".join(parts)


# --- prices -----------------------------------------------------------------------------------


def _priced_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each price: of a strategy and run, at each temperature."""
    return list({(r.strategy, r.run, r.temperature): r for r in rows if r.relaxed}.values())


def _price_words(price: Quality) -> str:
    """Say what a relaxed strategy moves, and whether its images are shown to differ."""
    moved = price.total_variation
    text = ""
    if isinstance(moved, Interval):
        text = f"moves {percent(moved.value)} of a token's probability; "
    found = price.distance
    if not isinstance(found, Distance):
        why = reason(found)
        return f"{text}the distance of its images {f'was not measured: {why}' if why else found}."
    verdict = "were not shown to differ from vanilla's"
    if found.p_value < LEVEL:
        verdict = "are farther from vanilla's than chance explains"
    return (
        f"{text}its {price.images} images {verdict} ({found.metric} {interval(found.value)}; "
        f"p = {found.p_value:.2g}). With {price.images} images, differences below about "
        f"{number(found.detectable)} would often be missed."
    )


def pricing_terms(terms: Terms) -> str:
    """Say what was asked for: quality, latency, prices."""
    share, seconds = 100 * terms.tv_budget, terms.latency_s
    exact = f"strategies that move {share:g} % of a token's probability at most"
    long = "any length" if seconds is None else f"{seconds:g} s at most"
    prices = "prices per hour as given" if terms.prices else "no price given"
    return f"{exact if share else 'exact decoding'}, requests of {long}, {prices}"
