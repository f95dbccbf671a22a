"""Finds whether drafting is faster on a device, and writes the sentences about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lantern_accel_profiles.measure.record import Interval, Run
from lantern_accel_profiles.report.record import Answer, EqualQuality, ModelSection
from lantern_accel_profiles.report.rows import Row
from lantern_accel_profiles.report.writing import (
    interval,
    reading,
    reason,
    size,
    times,
    verdict_words,
)

#: Budgets of total variation per token at which devices are compared.
BUDGETS = (0.0, 0.01, 0.02)
QUESTION = "Is drafting faster here?"
#: How an answer begins; ``at``: the batch size, where there are several.
LEADS = {
    "yes": "Yes{at}, with",
    "only relaxed": "Only relaxed{at}, with",
    "not shown": "Not shown{at}. The best strategy is",
    "no": "No{at}. The best strategy is",
    "unknown": "Unknown{at}. The best strategy is",
}

# --- facts ----------------------------------------------------------------------


def first_setting(rows: Sequence[Row]) -> tuple[int, float] | None:
    """Return the batch size and temperature of the first screen; None without rows.

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


def answer(here: Sequence[Row]) -> Answer:
    """Answer for the rows of one run, batch size and temperature."""
    compared = [r for r in here if r.drafts and isinstance(r.speedup, Interval)]
    # If none is faster, take the best, and one with a verdict if possible.
    compared.sort(key=lambda row: (not reason(row.verdict), _speedup(row)), reverse=True)
    faster = [row for row in compared if row.verdict == "faster"]
    exact = [row for row in faster if not row.relaxed]
    best = next(iter(exact or faster or compared), None)
    verdicts = {row.verdict for row in compared}
    helps: Literal["yes", "only relaxed", "not shown", "no", "unknown"] = "unknown"
    if faster:
        helps = "yes" if exact else "only relaxed"
    elif "ambiguous" in verdicts:
        helps = "not shown"
    elif verdicts & {"same", "slower"}:
        helps = "no"
    return Answer(
        run=here[0].run,
        batch=here[0].batch,
        temperature=here[0].temperature,
        helps=helps,
        best=None if best is None else best.strategy,
    )


def _speedup(row: Row) -> float:
    return row.speedup.value if isinstance(row.speedup, Interval) else 0.0


def equal_quality(
    runs: Sequence[Run], rows: Sequence[Row], asked: float = 0.0
) -> list[EqualQuality]:
    """Return each run's fastest strategy within each of :data:`BUDGETS`, and within the one asked for."""
    found = []
    for run in runs:
        here = at_setting(rows, run.name)
        plain = _row(here, "vanilla")
        if plain is None:
            continue
        for budget in sorted({*BUDGETS, asked}):
            fits = [row for row in here if row.moved is not None and row.moved <= budget]
            fits = [r for r in fits if r.drafts and (_speedup(r) > 1 or reason(r.verdict))]
            best = max((row for row in fits if _speedup(row)), key=_speedup, default=plain)
            verdict = best.verdict if best is not plain else "same"
            found.append(
                EqualQuality(
                    run=run.name,
                    budget=budget,
                    batch=plain.batch,
                    strategy=best.strategy,
                    # A busy machine's ratio is not compared with another device's either.
                    speedup=verdict if reason(verdict) else best.speedup,
                    verdict=verdict,
                )
            )
    return found


# --- sentences ------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceSentences:
    """One device's answer in sentences, with the rows of its table."""

    run: str
    short: str
    lines: list[str]
    rows: list[Row]


def device_sentences(section: ModelSection) -> list[DeviceSentences]:
    """Return whether drafting is faster with a model, for each device in sentences."""
    return [
        _device_sentences(one, at_setting(section.rows, one.run), section.rows)
        for one in section.answers
    ]


def _device_sentences(one: Answer, here: list[Row], rows: Sequence[Row]) -> DeviceSentences:
    """Answer for one batch size in full, and for the run's others in one sentence each."""
    others: dict[int, list[Row]] = {}
    for row in rows:
        if (row.run, row.temperature) == (one.run, one.temperature) and row.batch != one.batch:
            others.setdefault(row.batch, []).append(row)
    more = [_short_answer(answer(found), found, f" at batch {n}") for n, found in others.items()]
    short = _short_answer(one, here, f" at batch {one.batch}" if more else "")
    return DeviceSentences(one.run, short, [_work_words(one, here), *more], here)


def _row(rows: Sequence[Row], name: str | None) -> Row | None:
    return next((row for row in rows if row.strategy == name), None)


def _speed_words(row: Row) -> str:
    """Say how fast a row is: ``lantern++: 1.13x (0.91 to 1.32), not shown to be faster``."""
    verdict = verdict_words(row.verdict)
    words = f"{row.strategy}: {times(row.speedup)}"
    if verdict == "faster":
        return f"{words}, {row.fidelity}"
    return f"{words}, {verdict}" + (f"; {row.fidelity}" if row.relaxed or row.rounding else "")


def _short_answer(one: Answer, rows: Sequence[Row], at: str) -> str:
    best = _row(rows, one.best)
    if best is None:
        return f"Unknown{at}: no drafts were compared with plain decoding."
    return f"{LEADS[one.helps].format(at=at)} {_speed_words(best)}."


def _work_words(one: Answer, rows: Sequence[Row]) -> str:
    """Return seconds, memory and energy of an image with the answer's strategy, or plain decoding."""
    name = one.best if one.helps in ("yes", "only relaxed") else "vanilla"
    row = _row(rows, name) or rows[0]
    how = "plain decoding" if row.strategy == "vanilla" else row.strategy
    return (
        f"With {how}, seconds per image: {interval(row.seconds_per_image)}; "
        f"memory: {size(row.peak_bytes)}; J per image: {reading(row.joules_per_image)}."
    )
