"""Drawing one plot: matplotlib in colours that stand for roles, then SVG that the page themes.

Each stand-in colour is replaced by a CSS variable, and the type by the page's, so that one drawing
serves light and dark. Sizes are a phone's: the page shows plots in one column or in two.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lantern_accel.errors import RequestError
from lantern_accel.measure.record import PHASES

INSTALL = "pip install 'lantern-accel[report]'"
WIDTH, HEIGHT = 4.7, 2.9
STRATEGIES = ("vanilla", "eagle", "eagle2", "lantern", "lantern++")
#: Roles and the colours that stand for them while matplotlib draws.
ROLES = ("ink", "muted", "rule", "surface", "band")
_NAMES = [
    *ROLES,
    *(f"s-{i}" for i in range(len(STRATEGIES) + 1)),
    *(f"p-{name}" for name in PHASES),
]
_SENTINEL = {name: f"#{0x0A0B00 + i:06x}" for i, name in enumerate(_NAMES)}


def strategy_role(name: str) -> str:
    """Return the CSS variable of a strategy's colour; own strategies share the last one."""
    index = STRATEGIES.index(name) if name in STRATEGIES else len(STRATEGIES)
    return f"s-{index}"


def colour(role: str) -> str:
    return _SENTINEL[role]


def _pyplot() -> Any:
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
def drawing(name: str, height: float = HEIGHT) -> Iterator[tuple[Any, list[str]]]:
    """Give axes in the report's style; the list has the SVG afterwards."""
    plt = _pyplot()
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 8.5,
        "axes.edgecolor": colour("rule"),
        "axes.labelcolor": colour("muted"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": colour("rule"),
        "grid.linewidth": 0.5,
        "text.color": colour("ink"),
        "xtick.color": colour("muted"),
        "ytick.color": colour("muted"),
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "lines.linewidth": 1.4,
        "lines.markersize": 5.5,
    }
    out: list[str] = []
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        try:
            yield axes, out
            stream = io.BytesIO()
            figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
            out.append(_themed(stream.getvalue().decode()))
        finally:
            plt.close(figure)


def _themed(svg: str) -> str:
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
