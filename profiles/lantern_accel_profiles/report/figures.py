"""The report's plot of images per second, as SVG with the page's colours. Axes of rates begin at 0.

The light colours become CSS variables, as the type becomes the page's, so that one drawing serves light
and dark. Sizes are a phone's: the page shows plots in one column or in two.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from lantern_accel.errors import RequestError
from lantern_accel_profiles import plot_style as style
from lantern_accel_profiles.report.points import Point
from lantern_accel_profiles.report.record import ModelSection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Words that stand next to points of the curve at most.
MOST_NAMES = 12
#: Largest over smallest from which an axis of seconds is logarithmic.
WIDE = 20
INSTALL = "pip install 'lantern-accel[report]'"
WIDTH, HEIGHT = 4.7, 3.1
#: What the page calls every colour, with its light and its dark value.
PALETTE: dict[str, tuple[str, str]] = {
    **style.GROUND,
    **{f"s-{i}": pair for i, pair in enumerate([*style.STRATEGIES.values(), style.OTHER])},
    **{f"v-{name}": pair for name, pair in style.VERDICTS.items()},
}
#: Of each run in a plot, and the same as text; with :func:`series_role`, 56 runs look different.
MARKERS, GLYPHS = ("o", "s", "^", "D", "v", "P", "*", "X"), "●■▲◆▼✚★✖"


def series_role(index: int) -> str:
    """Return the CSS variable of a run's colour in a plot of runs: seven in turn."""
    return f"s-{(3, 4, 1, 6, 5, 2, 0)[index % 7]}"


def palette_css() -> str:
    """Return the palette as CSS variables: light, and dark on dark screens; paper is always light."""
    light, dark = (
        " ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1)
    )
    return (
        f":root {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def glyphs(runs: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and the sign that stand for each run in its plot."""
    return {run: (series_role(i), GLYPHS[i % len(GLYPHS)]) for i, run in enumerate(runs)}


def load_pyplot() -> ModuleType:
    """Return matplotlib's pyplot, set to draw SVG; raises RequestError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise RequestError(
            f"the page needs matplotlib and jinja2; {INSTALL}, or write .md or .json instead"
        ) from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    return plt


def _apply_theme(svg: str) -> str:
    """Return the SVG element alone, sized by the page, colours and type by CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r' xmlns(?::xlink)?="[^"]*"| version="1.1"', "", svg)
    svg = svg.replace("xlink:href", "href")
    for role, (colour, _) in PALETTE.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r"(font(?:-family)?: ?[^;\"']*?)'DejaVu Sans'[^;\"]*", r"\1var(--sans)", svg)
    return svg.replace("<svg", '<svg aria-hidden="true"', 1).strip()


def note(axes: Axes, text: str, point: tuple[float, float], away: tuple[int, int] = (6, 4)) -> None:
    """Write a word next to a point, ``away`` from it in points of type."""
    axes.annotate(
        text, point, textcoords="offset points", xytext=away, fontsize=7.5, color=style.INK
    )


def figures(section: ModelSection, bound: float | None) -> list[str]:
    """Plot a model's curve as SVG, for screens and for phones; nothing without points."""
    return [_plot_curve(section, bound, wide) for wide in (True, False)] if section.points else []


def _plot_curve(section: ModelSection, bound: float | None, wide: bool) -> str:
    """Plot images per second over seconds; a line joins the batch sizes of a device and strategy."""
    plt = load_pyplot()
    salt = {"svg.fonttype": "none", "svg.hashsalt": f"curve {wide}", "axes.grid": True}
    with plt.rc_context({**style.rc(), **salt}):
        width = 2 * WIDTH if wide else WIDTH  # a phone's, or two of them next to each other
        figure, axes = plt.subplots(figsize=(width, HEIGHT), layout="constrained")
        try:
            figure.patch.set_alpha(0)
            axes.patch.set_alpha(0)
            _fill_curve(axes, section, bound, MOST_NAMES if wide else MOST_NAMES // 3)
            stream = io.BytesIO()
            figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
            return _apply_theme(stream.getvalue().decode())
        finally:
            plt.close(figure)


def _fill_curve(axes: Axes, section: ModelSection, bound: float | None, most: int) -> None:
    points, runs = section.points, section.runs
    lines: dict[tuple[str, str, float, bool], list[Point]] = {}
    for one in sorted(points, key=lambda one: one.batch):
        lines.setdefault((one.run, one.strategy, one.temperature, one.service), []).append(one)
    for (run, *_), line in lines.items():
        shade = PALETTE[series_role(runs.index(run))][0]
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
        axes.axvline(bound, color=style.INK, lw=1, ls=(0, (4, 3)))
        note(axes, f"{bound:g} s", (bound, top), (4, -9))
    _name_points(axes, [one for one in points if one.front and not one.doubt], most)
    axes.set_ylabel("images per second")
    axes.set_xlabel("seconds from request to images, median")


def _mark(axes: Axes, one: Point, shade: str, marker: str) -> None:
    if one.doubt:
        axes.plot(one.seconds, one.images_per_second.value, "x", color=shade, ms=5, alpha=0.5)
        return
    rate, faint = one.images_per_second, 1.0 if one.front else 0.25
    axes.plot([one.seconds] * 2, [rate.low, rate.high], color=shade, lw=1, alpha=0.6 * faint)
    face = shade if one.moved == 0 else style.GROUND["surface"][0]
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
