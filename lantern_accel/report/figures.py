"""The report's plots: verdicts, speed and its price, phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lantern_accel.measure.record import PHASES, Distance, Interval, Quality, is_measured
from lantern_accel.quality.interval import SAME
from lantern_accel.report.drawing import Figure, colour, draw_axes, note, strategy_role
from lantern_accel.report.record import Comparison, ModelSection
from lantern_accel.report.rows import Row
from lantern_accel.report.verdict import at_setting
from lantern_accel.report.writing import as_sentence_list, times, upper

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of each run in a plot, and what its caption calls it.
MARKERS = {
    "o": "circles", "s": "squares", "^": "triangles", "D": "diamonds", "v": "wedges", "P": "P",
    "*": "*", "X": "X",
}  # fmt: skip
#: Where what has plain decoding's distribution stands on an axis of prices.
EXACT = Interval(value=0.0, low=0.0, high=0.0, n=1)


def figures(comparison: Comparison) -> dict[str, list[Figure]]:
    """Draw all plots of each model; a plot without data is left out."""
    found: dict[str, list[Figure]] = {}
    for section in comparison.models:
        made = found.setdefault(section.model, [])
        for plot in (_verdicts, _distance, _phases, _moved):
            plot(section, made)
    return found


def _first_rows(section: ModelSection) -> list[Row]:
    """Return the rows of the first screen, run by run."""
    return [r for one in section.first.answers for r in at_setting(section.rows, one.run)]


def _compared_rows(rows: Sequence[Row]) -> list[tuple[Row, Interval]]:
    """Return the rows that were held against plain decoding, with their speed-ups."""
    pairs = [(row, row.speedup) for row in rows if row.strategy != "vanilla"]
    return [(row, speed) for row, speed in pairs if isinstance(speed, Interval)]


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a plot, from the top down."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=colour("ink"))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _verdicts(section: ModelSection, into: list[Figure]) -> None:
    """Draw every strategy's speed-up with its interval, and what follows from it."""
    rows = _compared_rows(_first_rows(section))
    if not rows:
        return
    several = len({row.run for row, _ in rows}) > 1
    with draw_axes(
        into,
        "verdicts",
        "Does drafting pay?",
        "Filled: faster, slower, or the same speed (within the band). Hollow: not shown to be faster. "
        "The line at 1 is plain decoding.",
        height=0.75 + 0.27 * len(rows),
        wide=True,
    ) as axes:
        axes.axvspan(1 - SAME, 1 + SAME, color=colour("band"), lw=0)
        axes.axvline(1, color=colour("muted"), lw=0.8)
        for i, (row, speed) in enumerate(rows):
            known = row.verdict in ("faster", "slower", "same")
            shade = colour(f"v-{row.verdict if known else 'ambiguous'}")
            axes.plot([speed.low, speed.high], [i, i], color=shade, lw=1.6)
            face = shade if known else colour("surface")
            axes.plot(speed.value, i, "o", color=shade, ms=7, mfc=face)
            axes.annotate(
                times(speed),
                (1.0, i),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour("ink"),
            )
        _name_rows(axes, [f"{r.strategy}, {r.run}" if several else r.strategy for r, _ in rows])
        # A sample that was held up must not flatten the picture: such an interval leaves the frame.
        most = max(speed.value for _, speed in rows)
        axes.set_xlim(right=min(axes.get_xlim()[1], 2 * max(most, 1.0)))
        axes.set_xlabel("speed of whole requests relative to plain decoding's, 95 % interval")


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {run: [r for r in rows if r.run == run] for run in dict.fromkeys(r.run for r in rows)}


def _label(run: str, section: ModelSection) -> str:
    """Return what a title ends in: the run, where there are several."""
    return f": {run}" if len({row.run for row in section.rows}) > 1 else ""


def _phases(section: ModelSection, into: list[Figure]) -> None:
    for run, all_rows in _groups(section.rows).items():
        setting = min(r.batch for r in all_rows), all_rows[0].temperature
        rows = [r for r in all_rows if (r.batch, r.temperature) == setting]
        rows = [r for r in rows if is_measured(r.phase_ms["draft"])]
        if not rows:
            continue
        how = "eager step splits when the device is waited for at every phase's edge"
        if rows[0].phases_from == "recording":
            how = "recorded step splits by the device's own clock"
        with draw_axes(
            into,
            f"phases {run}",
            f"Where the time goes{_label(run, section)}",
            f"Batch {setting[0]}. The measured decoding time, split as the {how}. Each device has its "
            "own scale.",
            height=0.9 + 0.36 * len(rows),
        ) as axes:
            for i, row in enumerate(rows):
                left = 0.0
                for phase in PHASES:
                    value = row.phase_ms[phase]
                    if is_measured(value):
                        axes.barh(i, value, 0.62, left=left, color=colour(f"p-{phase}"))
                        left += value
            _name_rows(axes, [r.strategy for r in rows])
            axes.set_xlabel("milliseconds per image")


Point = tuple[Row, Interval, Interval]
"""A row with what it has on both axes."""


def _points(axes: Axes, points: Sequence[Point], base: float) -> None:
    """Draw y over x with both intervals; one marker per run, one colour per strategy.

    A line joins a strategy's batch sizes on one device; the fastest point of a strategy is labelled.
    ``base``: a height that the plot shows at least twice over.
    """
    runs, markers = list(dict.fromkeys(row.run for row, _, _ in points)), [*MARKERS]
    lines: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    highest: dict[str, tuple[float, float]] = {}
    for row, x, y in sorted(points, key=lambda one: one[0].batch):
        shade = colour(strategy_role(row.strategy))
        axes.plot([x.low, x.high], [y.value] * 2, color=shade, lw=1, alpha=0.55)
        axes.plot([x.value] * 2, [y.low, y.high], color=shade, lw=1, alpha=0.55)
        axes.plot(x.value, y.value, markers[runs.index(row.run) % len(markers)], color=shade)
        point = x.value, y.value
        lines.setdefault((row.run, row.strategy, row.temperature), []).append(point)
        highest[row.strategy] = max(highest.get(row.strategy, point), point, key=lambda p: p[1])
    for (_, strategy, _), ends in lines.items():
        axes.plot(
            *zip(*ends, strict=True), color=colour(strategy_role(strategy)), lw=0.8, alpha=0.7
        )
    axes.margins(x=0.16, y=0.16)
    # A sample that was held up must not flatten the picture: such an interval leaves the frame.
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 2 * max(base, *(y.value for _, _, y in points))))
    _name_points(axes, highest)


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write names beside points; where several stand one above another, apart from each other."""
    wide, high = (np.ptp(limits) for limits in (axes.get_xlim(), axes.get_ylim()))
    line = 0.06 * high  # a line of type, in units of the axis
    placed: list[tuple[float, float]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        at = y
        for a, b in placed:  # from the top down
            if abs(x - a) < 0.2 * wide and at > b - line:
                at = b - line
        note(axes, name, (x, at), (7, 3))
        placed.append((x, at))


def _runs_of(points: Sequence[Point]) -> str:
    runs = list(dict.fromkeys(row.run for row, _, _ in points))
    words = [f"{name}: {run}" for name, run in zip(MARKERS.values(), runs, strict=False)]
    return f"{upper('; '.join(words))}." if len(runs) > 1 else ""


def _moved(section: ModelSection, into: list[Figure]) -> None:
    rows = [(r, speed) for r, speed in _compared_rows(section.rows) if r.moved is not None]
    if not any(row.relaxed for row, _ in rows):
        return
    points = [(row, row.total_variation or EXACT, speed) for row, speed in rows]
    with draw_axes(
        into,
        "mass",
        "Speed against its price: total variation",
        "Exact strategies stand at 0. " + _runs_of(points),
    ) as axes:
        axes.axhline(1, color=colour("muted"), lw=0.8)
        _points(axes, points, 1.0)
        axes.set_ylabel("speed relative to plain decoding")
        axes.set_xlabel("total variation used per token (0 is exact)")


def _distance(section: ModelSection, into: list[Figure]) -> None:
    """Draw tokens per second of all strategies over the distance of their images from vanilla's."""
    points: list[Point] = []
    prices: list[tuple[int, Distance]] = []
    for row in (one for one in _first_rows(section) if one.moved is not None):
        x = EXACT
        if isinstance(row.price, Quality):
            far = row.price.distance
            if isinstance(far, str):
                continue
            prices.append((row.price.images, far))
            x = far.value
        points.append((row, x, row.tokens_per_second))
    if not prices:
        return
    low, high = min(d.floor.low for _, d in prices), max(d.floor.high for _, d in prices)
    with draw_axes(
        into,
        "distance",
        "Speed against the distance of the images",
        "Exact strategies have plain decoding's distribution, so they stand at 0. The band is the "
        "distance of two sets of plain decoding: what chance gives at "
        f"{min(images for images, _ in prices)} images. " + _runs_of(points),
    ) as axes:
        axes.axvspan(low, high, color=colour("band"), lw=0)
        _points(axes, points, 0.0)
        axes.set_ylabel("tokens per second")
        metrics = as_sentence_list(list(dict.fromkeys(one.metric for _, one in prices)))
        axes.set_xlabel(f"distance of the images from plain decoding's ({metrics})")
