"""A suite as an image: speed against quality, one panel per figure, what is dominated hollow."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lantern_accel_profiles.evaluation.schema import Metric, Suite
from lantern_accel_profiles.plot_style import INK, MUTED, colour_of, panels, plot_style
from lantern_accel_profiles.quality.interval import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Panels in one row of the plot.
COLUMNS = 3


@dataclass(frozen=True)
class Point:
    """A strategy's place in one panel; ``dominated``: another is as good in both, better in one."""

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
            found.append((row.label, row.strategy.name if row.strategy else "", speed, value))
    sign = 1.0 if metric.better == "higher" else -1.0
    places = [(speed.value, sign * value.value) for _, _, speed, value in found]
    beaten = [any(a >= x and b >= y and (a, b) != (x, y) for a, b in places) for x, y in places]
    return [Point(*one, dominated) for one, dominated in zip(found, beaten, strict=True)]


def picture(suite: Suite) -> bytes | None:
    """Return the plot as PNG; None where there is nothing to plot, or no matplotlib."""
    shown = [(metric, points(suite, metric)) for metric in suite.columns]
    shown = [(metric, found) for metric, found in shown if len(found) > 1]
    if not shown or importlib.util.find_spec("matplotlib") is None:
        return None
    with plot_style():
        figure, axes = panels(len(shown), columns=COLUMNS)
        for axis, (metric, found) in zip(axes, shown, strict=False):
            _panel(axis, metric, found)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def _panel(axis: Axes, metric: Metric, found: Sequence[Point]) -> None:
    for i, point in enumerate(found):
        colour = colour_of(point.strategy, i)
        x, y = point.speed, point.value
        # Of a bootstrap, whose ends may lie on one side of a value by rounding.
        xerr, yerr = ([[max(v.value - v.low, 0)], [max(v.high - v.value, 0)]] for v in (x, y))
        face, ink = ("white", MUTED) if point.dominated else (colour, INK)
        axis.errorbar(x.value, y.value, xerr=xerr, yerr=yerr, fmt="o", color=colour,
                      markerfacecolor=face, linewidth=0.8)  # fmt: skip
        text = f"{point.label} (dominated)" if point.dominated else point.label
        axis.annotate(text, (x.value, y.value), fontsize=7, xytext=(4, 4),
                      textcoords="offset points", color=ink)  # fmt: skip
    if metric.better == "lower":
        axis.invert_yaxis()
    axis.set_xlabel("images per second")
    axis.set_title(f"{metric.title} (up is better)")
    axis.grid(True)
    axis.margins(0.2)
