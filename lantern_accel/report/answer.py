"""The answer that a report begins with: whether drafting pays on a device, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from lantern_accel.measure.record import Cell, Interval, NotMeasured, Run
from lantern_accel.quality.interval import Verdict, unpaired_ratio
from lantern_accel.quality.interval import verdict as judge
from lantern_accel.records import Record
from lantern_accel.report.filing import disturbed, unpublishable
from lantern_accel.report.names import differences
from lantern_accel.report.offers import cell_of
from lantern_accel.report.rows import NO_BASE, Row, unsettled
from lantern_accel.strategy.values import AUTO

#: Samples per strategy below which confidence is low, and from which it may be high.
FEW, MANY = 10, 30
#: Half an interval over its figure up to which confidence may be high.
NARROW = 0.05


Pays = Literal["yes", "for a price", "not shown", "no", "unknown"]


class Answer(Record):
    """What one run says of drafting, at one batch size and temperature."""

    run: str
    batch: int
    temperature: float
    pays: Pays
    best: str | None = Field(description="the strategy that the answer is about")
    priced: str | None = Field(
        None, description="a relaxed strategy that is faster still, which has a price"
    )
    plain_seconds: Interval | NotMeasured = Field(description="per image, plain decoding")
    best_seconds: Interval | NotMeasured | None = Field(description="per image, None: none is best")
    unshown: list[str] = Field(description="strategies whose interval allows faster and slower")
    same: list[str]
    slower: list[str]
    unjudged: list[str] = Field(description="strategies without a verdict")
    confidence: Literal["low", "medium", "high"]
    because: list[str]
    untested: list[str]
    unpublishable: list[str] = Field(description="why it is not for publication; empty: it is")


class Standing(Record):
    """One device against the slowest: images per second, each with its fastest exact strategy."""

    run: str
    strategy: str
    against: str
    against_strategy: str
    batch: int
    ratio: Interval
    verdict: Verdict | NotMeasured


class Answers(Record):
    """The first screen of one model, as data."""

    answers: list[Answer]
    standings: list[Standing] = Field(description="fastest first; empty for a single run")
    differences: dict[str, list[str]] = Field(
        description="what differs besides the devices, in the order of the answers"
    )


def setting(rows: Sequence[Row]) -> tuple[int, float] | None:
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
    for choice in (setting(rows), setting(mine)):
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
    judged = [row for row in others if isinstance(row.speedup, Interval)]
    faster = sorted((r for r in judged if r.verdict == "faster"), key=_speedup, reverse=True)
    exact = [row for row in faster if not row.relaxed]
    relaxed = [row for row in faster if row.relaxed]
    # Where none is faster, the nearest: one with a verdict, if there is one.
    nearest = sorted(judged, key=lambda row: (row.verdict in _WORDS, _speedup(row)), reverse=True)
    best = next(iter(exact or relaxed or nearest), None)
    still = relaxed[0] if exact and relaxed and _speedup(relaxed[0]) > _speedup(exact[0]) else None
    names = {word: [r.strategy for r in judged if r.verdict == word] for word in _WORDS}
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
        untested=_untested(run, rows),
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
    doubts += disturbed(run)
    because += doubts
    if doubts or run.settings.plan.quick or samples < FEW:
        return "low", because
    speed = None if best is None else best.speedup
    narrow = isinstance(speed, Interval) and speed.high - speed.low <= 2 * NARROW * speed.value
    return ("high" if narrow and samples >= MANY else "medium"), because


def _untested(run: Run, rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row.run == run.name]
    found = [] if any(row.strategy == AUTO for row in mine) else [AUTO]
    found.append(f"batches above {max(row.batch for row in mine)}")
    return found + ["other devices"] * (len({row.device for row in rows}) == 1)


def _standings(runs: Sequence[Run], rows: Sequence[Row]) -> list[Standing]:
    """Hold every device against the slowest; empty where fewer than two can be compared."""
    found: list[tuple[Row, Cell]] = []
    choice = setting(rows)
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
            verdict=judge(ratio, unsettled=unsettled(cell, base)),
        )
        for (row, cell), ratio in zip(found, ratios, strict=True)
    ]
