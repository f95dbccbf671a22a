"""The report's plots: the buyer's curve. Every axis of a rate begins at 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_accel_profiles.report.drawing import (
    MARKERS,
    Figure,
    colour,
    draw_axes,
    note,
    series_role,
)
from lantern_accel_profiles.report.points import Point
from lantern_accel_profiles.report.record import Comparison, ModelSection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Words that stand next to points of the curve at most.
MOST_NAMES = 12
#: Largest over smallest from which an axis of seconds is logarithmic.
WIDE = 20


def figures(comparison: Comparison) -> dict[str, list[Figure]]:
    """Draw all plots of each model, the curve first; a plot without data is left out."""
    found: dict[str, list[Figure]] = {}
    for section in comparison.models:
        made = found.setdefault(section.model, [])
        _curve(section, comparison.terms.latency_s, made)
    return found


def _curve(section: ModelSection, bound: float | None, into: list[Figure]) -> None:
    """Draw images per second over seconds; a line joins the batch sizes of a device and strategy."""
    for wide in (True, False) if section.points else ():  # for screens, and for phones
        _draw_curve(section, bound, into, wide)


def _draw_curve(section: ModelSection, bound: float | None, into: list[Figure], wide: bool) -> None:
    points, runs = section.points, section.runs
    with draw_axes(
        into,
        f"curve {wide}",
        "Images per second over seconds per request",
        "Up and left is better. A line joins the batch sizes of a strategy. Hollow: not exact. Faded: "
        "another point of the device is as good in everything. Crosses: not judged.",
        height=3.1,
        wide=wide,
    ) as axes:
        lines: dict[tuple[str, str, float, bool], list[Point]] = {}
        for one in sorted(points, key=lambda one: one.batch):
            lines.setdefault((one.run, one.strategy, one.temperature, one.service), []).append(one)
        for (run, *_), line in lines.items():
            shade = colour(series_role(runs.index(run)))
            judged = [one for one in line if not one.doubt]
            axes.plot(
                [one.seconds for one in judged],
                [one.images_per_second.value for one in judged],
                color=shade,
                lw=1,
                alpha=0.65 if any(one.front for one in judged) else 0.18,
            )
            for one in line:
                _mark(axes, one, shade, MARKERS[runs.index(run) % len(MARKERS)])
        seconds = [one.seconds for one in points] + ([bound] if bound else [])
        if max(seconds) > WIDE * min(seconds):
            axes.set_xscale("log", subs=[2, 5])
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}")
        else:
            axes.set_xlim(0, 1.12 * max(seconds))
        top = 1.15 * max(one.images_per_second.value for one in points)
        axes.set_ylim(0, top)
        if bound:
            axes.axvline(bound, color=colour("ink"), lw=1, ls=(0, (4, 3)))
            note(axes, f"{bound:g} s", (bound, top), (4, -9))
        named = [one for one in points if one.front and not one.doubt]
        _name_points(axes, named, MOST_NAMES if wide else MOST_NAMES // 3)
        axes.set_ylabel("images per second")
        axes.set_xlabel("seconds from request to images, median")


def _mark(axes: Axes, one: Point, shade: str, marker: str) -> None:
    if one.doubt:
        axes.plot(one.seconds, one.images_per_second.value, "x", color=shade, ms=5, alpha=0.5)
        return
    rate, faint = one.images_per_second, 1.0 if one.front else 0.25
    axes.plot([one.seconds] * 2, [rate.low, rate.high], color=shade, lw=1, alpha=0.6 * faint)
    face = shade if one.moved == 0 else colour("surface")
    axes.plot(one.seconds, rate.value, marker, color=shade, mfc=face, ms=6, alpha=faint)


def _name_points(axes: Axes, points: Sequence[Point], most: int) -> None:
    """Write strategy and batch next to points, the fastest first, where no other name stands yet."""
    axes.figure.canvas.draw()  # an axis has its final scale only then
    taken: list[tuple[float, float, float]] = []
    for one in sorted(points, key=lambda one: -one.images_per_second.value):
        words = f"{one.strategy}, {one.setting}"
        x, y = axes.transData.transform((one.seconds, one.images_per_second.value))
        wide, high = 4.6 * len(words) + 10, 13
        free = all(x + wide < a or a + b < x or abs(y - c) > high for a, c, b in taken)
        if free and len(taken) < most:
            taken.append((x, y, wide))
            note(axes, words, (one.seconds, one.images_per_second.value))
