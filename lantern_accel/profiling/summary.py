"""What a reader should know after one screen: the fastest, its price, and what is uncertain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lantern_accel.profiling.comparison import Comparison, ModelSection, rank
from lantern_accel.profiling.record import Interval, Quality, is_measured
from lantern_accel.profiling.rows import Row
from lantern_accel.profiling.writing import number, percent

#: Others' share of the host's cores above which a run is called disturbed.
DISTURBED = 0.1


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen."""

    label: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True)
class Glance:
    """One run in one line: its fastest rows at one batch size."""

    device: str
    run: str
    batch: int
    vanilla: Row | None
    exact: Row | None
    relaxed: Row | None


@dataclass(frozen=True)
class Summary:
    """The first screen of one model."""

    tiles: list[Tile]
    glance: list[Glance]
    sentences: list[str]


def summarise(comparison: Comparison, section: ModelSection) -> Summary:
    """Return the first screen of a model's section; only measured rows are looked at."""
    exact = [row for row in section.rows if not row.relaxed]
    relaxed = [row for row in section.rows if row.relaxed and isinstance(row.speedup, Interval)]
    tiles = [_speed_tile("Fastest exact decoding", exact)] if exact else []
    if relaxed:
        tiles.append(_relaxed_tile(relaxed))
    gain = [row for row in section.rows if row.strategy != "vanilla"]
    if gain:
        best = max(gain, key=lambda row: row.step_compression)
        tiles.append(
            Tile(
                "Step compression",
                number(best.step_compression),
                "tokens a step",
                f"{best.strategy}, batch {best.batch}; "
                + (
                    f"{percent(best.conversion)} of it becomes speed"
                    if is_measured(best.conversion)
                    else "how much of it becomes speed is not known"
                ),
            )
        )
    tiles.append(
        Tile(
            "Not measured",
            str(len(comparison.gaps)),
            "gaps",
            "each with its reason and, where there is one, the command that fills it",
        )
    )
    return Summary(
        tiles,
        _glance(section.rows),
        [*_verdicts(section.rows), *_prices(section), *_caveats(comparison, section)],
    )


def _glance(rows: Sequence[Row]) -> list[Glance]:
    """Return a line a run, all at the smallest batch size that all runs have, if there is one."""
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    shared = set.intersection(*({r.batch for r in mine} for mine in by_run.values()))
    found = []
    for run, mine in by_run.items():
        batch = min(shared or {row.batch for row in mine})
        here = [row for row in mine if row.batch == batch]
        exact = [row for row in here if not row.relaxed]
        relaxed = [row for row in here if row.relaxed and isinstance(row.speedup, Interval)]
        found.append(
            Glance(
                here[0].device,
                run,
                batch,
                next((row for row in here if row.strategy == "vanilla"), None),
                rank(exact)[0][1] if exact else None,
                rank(relaxed)[0][1] if relaxed else None,
            )
        )
    return found


def _speed_tile(label: str, rows: Sequence[Row]) -> Tile:
    places = rank(rows)
    best = places[0][1]
    images = best.images_per_second
    known = isinstance(images, Interval)
    return Tile(
        label,
        number(images.value if isinstance(images, Interval) else best.tokens_per_second.value),
        "images a second" if known else "tokens a second",
        f"{best.strategy}, batch {best.batch}, {best.device}{_tied(places)}",
    )


def _tied(places: Sequence[tuple[int, Row]]) -> str:
    """Name the rows that noise does not tell from the first."""
    names = [row.strategy for place, row in places[1:] if place == 1]
    return f"; not told from {', '.join(dict.fromkeys(names))}" if names else ""


def _relaxed_tile(rows: Sequence[Row]) -> Tile:
    best = rank(rows, key="speedup")[0][1]
    assert isinstance(best.speedup, Interval)
    price = best.price
    moved = ""
    if isinstance(price, Quality) and isinstance(price.total_variation, Interval):
        moved = f"; moves {percent(price.total_variation.value)} of a token's probability"
    return Tile(
        "Best relaxed speed-up",
        f"{best.speedup.value:.2f}\N{MULTIPLICATION SIGN}",
        "of vanilla on its device",
        f"{best.strategy}, batch {best.batch}: {best.verdict}{moved}",
    )


def _verdicts(rows: Sequence[Row]) -> list[str]:
    judged = [
        row for row in rows if isinstance(row.speedup, Interval) and row.strategy != "vanilla"
    ]
    if not judged:
        return []
    counts = Counter(row.verdict for row in judged)
    words = [f"{counts[v]} {v}" for v in ("faster", "same", "slower", "ambiguous") if counts[v]]
    text = f"Against vanilla on the same device, of {len(judged)} strategies and batch sizes: "
    text += ", ".join(words)
    if counts["ambiguous"]:
        text += " (ambiguous: the interval of the ratio allows both)"
    return [text + "."]


def _prices(section: ModelSection) -> list[str]:
    """Say for each relaxed strategy how far its images are from chance's distance."""
    told: dict[str, str] = {}
    for row in section.rows:
        price = row.price
        if not isinstance(price, Quality) or row.strategy in told:
            continue
        if isinstance(price.distance, str):
            told[row.strategy] = f"{row.strategy}: image distance {price.distance}."
            continue
        d = price.distance
        far = d.value.low > d.floor.high
        told[row.strategy] = (
            f"The images of {row.strategy} are "
            + ("farther from vanilla's than chance explains" if far else "not told from vanilla's")
            + f" at {price.images} images: {d.metric} {number(d.value.value)} "
            f"({number(d.value.low)} to {number(d.value.high)}), chance alone gives "
            f"{number(d.floor.value)} ({number(d.floor.low)} to {number(d.floor.high)})."
        )
    return list(told.values())


def _caveats(comparison: Comparison, section: ModelSection) -> list[str]:
    found = [
        f"Run {run.name} is {run.state}, not complete; `{run.command} --resume` goes on."
        for run in comparison.runs
        if run.state != "complete" and run.settings.model == section.model
    ]
    loads = [row.others_cpu for row in section.rows if is_measured(row.others_cpu)]
    if loads and max(loads) > DISTURBED:
        found.append(
            f"Other processes used up to {percent(max(loads))} of the host while samples were taken; "
            "measure again on a quiet machine before quoting a figure."
        )
    restless = sorted({row.strategy for row in section.rows if not row.settled})
    if restless:
        found.append(f"Warm-up ended before times settled: {', '.join(restless)}.")
    factors = [e.factor for e in section.errors if e.limits.startswith("ceilings")]
    if factors:
        found.append(
            f"The roofline model promises {number(min(factors))} to {number(max(factors))} times what "
            "was measured, so read projections with that factor in mind."
        )
    return found
