"""What a reader should know after one screen: the fastest, its price, and what is uncertain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lantern_accel.measure.record import Distance, Interval, Quality, is_measured
from lantern_accel.report.comparison import Comparison, ModelSection, rank
from lantern_accel.report.rows import Row
from lantern_accel.report.writing import judged, number, percent, reason

#: Others' share of the host's cores above which a run is called disturbed.
DISTURBED = 0.1
#: A permutation test's p-value below which images are called different.
LEVEL = 0.05
#: Rows that a card names as within noise of its own.
NAMED = 3


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
    warnings: list[str]
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
        best = max(gain, key=lambda row: row.step_compression.value)
        tiles.append(
            Tile(
                "Step compression",
                number(best.step_compression.value),
                "tokens per step",
                f"{best.strategy}, batch {best.batch}; {number(best.over_prompts.low)} to "
                f"{number(best.over_prompts.high)} over prompts; "
                + (
                    f"{percent(best.conversion.value)} of it becomes speed"
                    if isinstance(best.conversion, Interval)
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
        _warnings(comparison, section),
        [*_verdicts(section.rows), *_prices(section)],
    )


def _glance(rows: Sequence[Row]) -> list[Glance]:
    """Return a line a run, all at the smallest batch size that all runs have, if there is one."""
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    if not by_run:  # what interrupted the runs came before their first sample
        return []
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
    # The figure that decides is the figure that is shown.
    known = all(isinstance(row.images_per_second, Interval) for row in rows)
    key = "images_per_second" if known else "tokens_per_second"
    places = rank(rows, key)
    best = places[0][1]
    return Tile(
        label,
        number(getattr(best, key).value),
        "images per second" if known else "tokens per second",
        f"{best.strategy}, batch {best.batch}, {best.device}{_tied(places)}",
    )


def _tied(places: Sequence[tuple[int, Row]]) -> str:
    """Name the rows that noise does not tell from the first."""
    best = places[0][1]
    names = [
        row.strategy if row.run == best.run else f"{row.strategy} of {row.run}"
        for place, row in places[1:]
        if place == 1
    ]
    others = [name for name in dict.fromkeys(names) if name != best.strategy]
    if len(others) > NAMED:
        others = [*others[:NAMED], f"{len(others) - NAMED} more"]
    return f"; within noise: {', '.join(others)}" if others else ""


def _relaxed_tile(rows: Sequence[Row]) -> Tile:
    """Headline the fastest relaxed row whose difference from vanilla is one, if there is such a row."""
    judged_rows = [row for row in rows if row.verdict in ("faster", "slower", "same")]
    best = rank(judged_rows or rows, key="speedup")[0][1]
    assert isinstance(best.speedup, Interval)
    ratio = f"{best.speedup.value:.2f}\N{MULTIPLICATION SIGN}"
    note = f"{best.strategy}, batch {best.batch}: {judged(str(best.verdict))}"
    price = best.price
    if isinstance(best.over_exact, Interval):
        note += (
            f"; {best.over_exact.value:.2f}\N{MULTIPLICATION SIGN} exact decoding on its tree "
            f"({judged(str(best.exact_verdict))})"
        )
    if isinstance(price, Quality) and isinstance(price.total_variation, Interval):
        note += f"; moves {percent(price.total_variation.value)} of a token's probability"
    if not judged_rows:
        return Tile("Fastest relaxed decoding", "no verdict", "", f"{ratio} of vanilla, {note}")
    return Tile("Fastest relaxed decoding", ratio, "vanilla's speed on the same device", note)


def _verdicts(rows: Sequence[Row]) -> list[str]:
    compared = [
        row for row in rows if isinstance(row.speedup, Interval) and row.strategy != "vanilla"
    ]
    if not compared:
        return []
    counts = Counter(row.verdict for row in compared)
    words = [f"{counts[v]} {v}" for v in ("faster", "same", "slower") if counts[v]]
    if counts["ambiguous"]:
        words.append(f"{counts['ambiguous']} ambiguous (the interval of the ratio allows both)")
    words += [
        f"{count} without a verdict ({reason(word)})"
        for word, count in counts.items()
        if reason(word)
    ]
    text = f"Against vanilla on the same device, of {len(compared)} strategies and batch sizes: "
    return [text + ", ".join(words) + "."]


def _prices(section: ModelSection) -> list[str]:
    """Say for each relaxed strategy whether its images are farther than chance puts them."""
    prices: dict[str, dict[str, Quality]] = {}
    several = len({row.temperature for row in section.rows}) > 1
    for row in section.rows:
        if isinstance(row.price, Quality):
            where = f"{row.run} at T {row.temperature:g}" if several else row.run
            prices.setdefault(row.strategy, {}).setdefault(where, row.price)
    return [
        f"{strategy}: {_told_once(*runs.values()) if len(runs) == 1 else _told_of(runs)}"
        for strategy, runs in prices.items()
    ]


def _is_far(distance: Distance) -> bool:
    return distance.p_value < LEVEL


def _told_once(price: Quality) -> str:
    d = price.distance
    if isinstance(d, str):
        return f"image distance {d}."
    words = (
        "are farther from vanilla's than chance explains"
        if _is_far(d)
        else "cannot be distinguished from vanilla's by this distance"
    )
    return (
        f"its {price.images} images {words} (sign-flip permutation test, p = {d.p_value:.2g}; "
        f"{d.metric} {number(d.value.value)}, 95 % {number(d.value.low)} to {number(d.value.high)}; two "
        f"vanilla sets of other seeds {number(d.floor.value)}). {_power(d)}"
    )


def _power(distance: Distance) -> str:
    """Say what shift so many images can show."""
    return f"So many images find a distance of {number(distance.detectable)} in four of five cases."


def _told_of(runs: Mapping[str, Quality]) -> str:
    known = {run: one.distance for run, one in runs.items() if isinstance(one.distance, Distance)}
    far = [run for run, distance in known.items() if _is_far(distance)]
    text = (
        f"its images are farther from vanilla's than chance explains in {', '.join(far)}"
        if far
        else "its images cannot be distinguished from vanilla's by the image distance"
    )
    fewest = min(price.images for price in runs.values())
    text += f"; measured {len(known)} of {len(runs)} times, over {fewest} images or more."
    return text + (f" {_power(max(known.values(), key=lambda d: d.detectable))}" if known else "")


def projection_error(section: ModelSection) -> str:
    """Say how far the roofline model is from what was measured; empty where nothing can be said."""
    factors = [e.factor for e in section.errors if e.limits.startswith("ceilings")]
    if not factors:
        return ""
    low, high = number(min(factors)), number(max(factors))
    span = low if low == high else f"{low} to {high}"
    return (
        f"On the measured devices the roofline model promises {span} times what was measured, so read "
        "projections with that factor in mind."
    )


def _warnings(comparison: Comparison, section: ModelSection) -> list[str]:
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
    return found
