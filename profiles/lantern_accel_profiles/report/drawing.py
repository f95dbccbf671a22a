"""Drawing one plot: matplotlib in colours that stand for roles, then SVG that the page themes.

Each stand-in colour is replaced by a CSS variable, and the type by the page's, so that one drawing
serves light and dark. Sizes are a phone's: the page shows plots in one column or in two.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from lantern_accel.errors import RequestError
from lantern_accel_profiles import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'lantern-accel[report]'"
WIDTH, HEIGHT = 4.7, 2.9
#: What the page calls every colour, with its light and its dark value.
PALETTE: dict[str, tuple[str, str]] = {
    **style.GROUND,
    **{f"s-{i}": pair for i, pair in enumerate([*style.STRATEGIES.values(), style.OTHER])},
    **{f"v-{name}": pair for name, pair in style.VERDICTS.items()},
}
#: The colours that stand for them while matplotlib draws.
_SENTINEL = {name: f"#{0x0A0B00 + i:06x}" for i, name in enumerate(PALETTE)}


@dataclass(frozen=True)
class Figure:
    """One plot: inline SVG, what it shows, and how to read it."""

    svg: str
    title: str
    caption: str
    wide: bool = False


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


def colour(role: str) -> str:
    """Return the stand-in for a colour of the palette."""
    return _SENTINEL[role]


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


@contextmanager
def draw_axes(
    into: list[Figure],
    name: str,
    title: str,
    caption: str,
    *,
    height: float = HEIGHT,
    wide: bool = False,
) -> Iterator[Axes]:
    """Give axes in the report's style, and add the figure drawn on them; ``name``: that no other has."""
    plt = load_pyplot()
    settings = {**style.rc(colour), "svg.fonttype": "none", "svg.hashsalt": name, "axes.grid": True}
    with plt.rc_context(settings):
        width = 2 * WIDTH if wide else WIDTH  # a phone's, or two of them next to each other
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        try:
            yield axes
            stream = io.BytesIO()
            figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
            into.append(Figure(_apply_theme(stream.getvalue().decode()), title, caption, wide))
        finally:
            plt.close(figure)


def _apply_theme(svg: str) -> str:
    """Return the SVG element alone, sized by the page, colours and type by CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r' xmlns(?::xlink)?="[^"]*"| version="1.1"', "", svg)
    svg = svg.replace("xlink:href", "href")
    for role, colour in _SENTINEL.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r"(font(?:-family)?: ?[^;\"']*?)'DejaVu Sans'[^;\"]*", r"\1var(--sans)", svg)
    return svg.replace("<svg", '<svg aria-hidden="true"', 1).strip()


def note(axes: Axes, text: str, point: tuple[float, float], away: tuple[int, int] = (6, 4)) -> None:
    """Write a word next to a point, ``away`` from it in points of type."""
    axes.annotate(
        text, point, textcoords="offset points", xytext=away, fontsize=7.5, color=colour("ink")
    )
