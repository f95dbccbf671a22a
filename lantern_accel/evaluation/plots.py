"""The evaluation as pictures: a plot per part, and speed against quality of a suite's strategies."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_accel.evaluation.schema import Evaluation, Metric, Suite
from lantern_accel.quality.interval import Interval
from lantern_accel.quality.style import (
    BAR,
    INK,
    MUTED,
    RULE,
    check_matplotlib,
    colour_of,
    panels,
    save,
    styled,
)
from lantern_accel.strategy.rules import Lantern, LanternPP

#: Lines and markers of a strategy's settings.
LINES = (("-", "o"), ("--", "s"), (":", "^"))


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    axis.barh(range(len(names)), values, color=BAR)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title)
    for i, value in enumerate(values):
        axis.text(value, i, f" {value:.3g}", va="center", fontsize=7)
    axis.margins(x=0.18)


def _intervals(axis: Any, names: Sequence[str], found: Sequence[Interval], title: str) -> None:
    """Draw figures that may lie on either side of 0: a point and its interval each."""
    axis.axvline(0, color=RULE, linewidth=1)
    for i, one in enumerate(found):
        axis.plot((one.low, one.high), (i, i), color=BAR)
        axis.plot(one.value, i, "o", color=BAR)
        axis.text(one.high, i, f"  {one.value:.3g}", va="center", fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title)
    axis.margins(x=0.12, y=0.12)


def ambiguity(report: Evaluation) -> Any:
    """Top-1, top-10 mass and entropy: images with and without guidance, next to text."""
    assert report.ambiguity
    rows = report.ambiguity
    names = [row.of if row.cfg is None else f"{row.of}, CFG {row.cfg:g}" for row in rows]
    figure, axes = panels(3)
    _bars(axes[0], names, [row.top1_mean for row in rows], "likeliest token, mean probability")
    _bars(axes[1], names, [row.top10_mass for row in rows], "mass of the ten likeliest")
    _bars(axes[2], names, [row.entropy for row in rows], "entropy (nats)")
    for axis in axes[1:]:
        axis.set_yticklabels([])
    return figure


def interchange(report: Evaluation) -> Any:
    """Damage when every code is replaced."""
    assert report.interchange
    rows = report.interchange[1:]
    names = [row.replaced_by for row in rows]
    measured = all(row.feature_distance is not None for row in rows)
    figure, axes = panels(2 if measured else 1)
    _bars(axes[0], names, [row.psnr for row in rows], "PSNR to the undamaged picture (dB)")
    if measured:
        values = [row.feature_distance or 0.0 for row in rows]
        _bars(axes[1], names, values, "feature distance to it")
        axes[1].set_yticklabels([])
    return figure


def frontier(report: Evaluation) -> Any:
    """Accepted length against the total variation that it costs."""
    assert report.frontier
    figure, axes = panels(1, width=6.0, height=4.2)
    axis = axes[0]
    series: dict[str, list[tuple[float, float, str]]] = {}
    for point in report.frontier:
        rule, text = point.strategy.acceptance, ""
        name = point.strategy.name
        if isinstance(rule, Lantern):
            name, text = f"lantern, k = {rule.k}", f"{rule.delta:g}"
        elif isinstance(rule, LanternPP):
            name, text = f"lantern++, k = {rule.k}", f"{rule.lam:g}"
        if point.strategy.tv_budget is not None:
            name = f"{point.strategy.name}, k = {rule.k}, budget"
            text = f"{point.strategy.tv_budget:g}"
        where = (point.total_variation.value, point.step_compression.value, text)
        series.setdefault(name, []).append(where)
    seen: dict[str, int] = {}
    for name, points in series.items():
        points.sort()
        # A strategy has its colour everywhere; its settings differ in lines and markers.
        own = name.partition(",")[0]
        form = seen[own] = seen.get(own, -1) + 1
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        line, marker = LINES[form % len(LINES)]
        axis.plot(xs, ys, ls=line, marker=marker, label=name, color=colour_of(own))
        for x, y, text in points:
            axis.annotate(text, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axis.set_xlabel("total variation per token")
    axis.set_ylabel("tokens per target forward")
    axis.set_title("numbers: delta, lambda, or budget")
    axis.grid(True)
    axis.legend()
    return figure


def distances(report: Evaluation) -> Any:
    """Distance of each strategy's pictures from exact decoding's."""
    assert report.distances
    rows = report.distances
    names = ["vanilla, another seed", *(row.strategy.name for row in rows[1:])]
    figure, axes = panels(2)
    if all(row.kid is not None for row in rows):
        found = [row.kid for row in rows if row.kid is not None]
        _intervals(axes[0], names, found, "KID x 1000, with its 95 % interval")
    else:
        axes[0].set_axis_off()
    same = [row.greedy_same_tokens.value if row.greedy_same_tokens else 0.0 for row in rows[1:]]
    _bars(axes[1], names[1:], same, "greedy: share of equal tokens")
    return figure


_FIGURES: dict[str, Callable[[Evaluation], Any]] = {
    "ambiguity": ambiguity,
    "interchange": interchange,
    "frontier": frontier,
    "distances": distances,
}


def save_plots(report: Evaluation, folder: Path) -> list[Path]:
    """Write a PNG for each part that was measured; return their paths.

    Raises :class:`DataError` where matplotlib is not installed.
    """
    check_matplotlib()
    written = []
    for name, make in _FIGURES.items():
        if getattr(report, name):
            with styled():
                save(make(report), folder / f"{name}.png")
            written.append(folder / f"{name}.png")
    return written


# --- suites: one panel per measured figure, what is dominated marked --------------------------------

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
    if not shown or importlib.util.find_spec("matplotlib") is None:
        return None
    with styled():
        figure, axes = panels(len(shown), columns=COLUMNS)
        for axis, (metric, found) in zip(axes, shown, strict=False):
            _panel(axis, metric, found)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def _panel(axis: Any, metric: Metric, found: Sequence[Point]) -> None:
    for i, point in enumerate(found):
        colour = colour_of(point.strategy, i)
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
            color=MUTED if point.dominated else INK,
        )
    if metric.better == "lower":
        axis.invert_yaxis()
    axis.set_xlabel("images per second")
    axis.set_title(f"{metric.title} (up is better)")
    axis.grid(True)
    axis.margins(0.2)
