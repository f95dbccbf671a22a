"""Speed against quality as plots, one panel per measured figure; what is dominated is marked."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lantern_accel.evaluation.suite.schema import Metric, Suite
from lantern_accel.quality import style
from lantern_accel.quality.interval import Interval

#: Panels in one row of the plot.
COLUMNS = 3


@dataclass(frozen=True)
class Point:
    """A strategy's place in one panel; ``dominated``: another is no worse in both, and better in one."""

    label: str
    strategy: str
    speed: Interval
    value: Interval
    dominated: bool


def points(suite: Suite, metric: Metric) -> list[Point]:
    """Return the strategies that have both figures; speed in images per second.

    Dominance is of the values: two that differ by less than their intervals may change places.
    """
    found = []
    for row in suite.rows:
        seconds, value = row.speed.seconds_per_image, row.metrics.get(metric.key)
        if isinstance(seconds, Interval) and isinstance(value, Interval) and seconds.low > 0:
            speed = Interval(
                value=1 / seconds.value, low=1 / seconds.high, high=1 / seconds.low, n=seconds.n
            )
            name = row.strategy.name if row.strategy is not None else ""
            found.append((row.label, name, speed, value))
    sign = 1.0 if metric.better == "higher" else -1.0
    places = [(speed.value, sign * value.value) for _, _, speed, value in found]
    return [
        Point(label, name, speed, value, dominated(places[i], places))
        for i, (label, name, speed, value) in enumerate(found)
    ]


def dominated(place: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Return whether another place is as high in both, and higher in one."""
    return any(
        a >= place[0] and b >= place[1] and (a > place[0] or b > place[1]) for a, b in others
    )


def picture(suite: Suite) -> bytes | None:
    """Return the plot as PNG; None where there is nothing to plot, or no matplotlib."""
    shown = [(metric, points(suite, metric)) for metric in suite.columns]
    shown = [(metric, found) for metric, found in shown if len(found) > 1]
    if not shown:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    with style.styled():
        rows = -(-len(shown) // COLUMNS)
        wide = min(len(shown), COLUMNS)
        figure = Figure(figsize=(4.2 * wide, 3.4 * rows), layout="constrained")
        axes = figure.subplots(rows, wide, squeeze=False).flatten()
        for axis, (metric, found) in zip(axes, shown, strict=False):
            _panel(axis, metric, found)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def _panel(axis: Any, metric: Metric, found: Sequence[Point]) -> None:
    for i, point in enumerate(found):
        colour = style.colour_of(point.strategy, i)
        x, y = point.speed, point.value
        axis.errorbar(
            x.value,
            y.value,
            # Of a bootstrap, whose ends may lie on one side of a value by rounding.
            xerr=[[max(x.value - x.low, 0)], [max(x.high - x.value, 0)]],
            yerr=[[max(y.value - y.low, 0)], [max(y.high - y.value, 0)]],
            fmt="o",
            color=colour,
            markerfacecolor="white" if point.dominated else colour,
            linewidth=0.8,
        )
        text = f"{point.label} (dominated)" if point.dominated else point.label
        axis.annotate(
            text,
            (x.value, y.value),
            fontsize=7,
            xytext=(4, 4),
            textcoords="offset points",
            color=style.MUTED if point.dominated else style.INK,
        )
    if metric.better == "lower":
        axis.invert_yaxis()
    axis.set_xlabel("images per second")
    axis.set_title(f"{metric.title} (up is better)")
    axis.grid(True)
    axis.margins(0.2)
