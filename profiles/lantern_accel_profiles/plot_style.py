"""Gives every plot one look: colours of strategies and verdicts, type and grid.

Light and printable. Colours are Okabe and Ito's, which most colour-blind readers can distinguish, and no
plot says by colour alone what it says. Images in files use them as they are; the page of a report draws
with stand-ins and has a second set for dark screens. matplotlib is an extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, RULE, BAND, BAR = "#222222", "#5b6570", "#dfe3e7", "#eceff1", "#0072b2"
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
#: What strategies look like wherever they are drawn, on light and on dark ground ...
STRATEGIES = {
    "vanilla": ("#222222", "#dfe4e9"),
    "auto": ("#009e73", "#35c79d"),
    "eagle": ("#56b4e9", "#7cc7f2"),
    "eagle2": ("#0072b2", "#4ba3dc"),
    "lantern": ("#d55e00", "#f08a3c"),
    "lantern++": ("#e69f00", "#f3bd4e"),
    "scd": ("#cc79a7", "#e2a2c6"),
}
#: ... and every other one.
OTHER = ("#8a8f98", "#9aa5af")
#: Verdicts; what was not shown is drawn hollow.
VERDICTS = {
    "faster": ("#0072b2", "#4ba3dc"),
    "slower": ("#d55e00", "#f08a3c"),
    "same": ("#222222", "#dfe4e9"),
    "ambiguous": ("#8a8f98", "#9aa5af"),
}
#: What is neither: text, lines, ground.
GROUND = {
    "ink": (INK, "#e6e9ec"),
    "muted": (MUTED, "#9aa5af"),
    "rule": (RULE, "#30373e"),
    "surface": ("#ffffff", "#191d21"),
    "band": (BAND, "#262c32"),
}


def rc(colour: Callable[[str], str] = lambda role: GROUND[role][0], size: float = 8.5) -> Any:
    """Return matplotlib's settings; ``colour`` gives what stands for a role of :data:`GROUND`."""
    return {
        "font.size": size,
        "axes.titlesize": size + 1,
        "axes.edgecolor": colour("rule"),
        "axes.labelcolor": colour("muted"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "grid.color": colour("rule"),
        "grid.linewidth": 0.5,
        "legend.fontsize": size - 1,
        "legend.frameon": False,
        "text.color": colour("ink"),
        **{f"{axis}tick.color": colour("muted") for axis in "xy"},
        **{f"{axis}tick.{which}.size": 0 for axis in "xy" for which in ("major", "minor")},
        "lines.linewidth": 1.4,
        "lines.markersize": 5.5,
    }


@contextmanager
def plot_style() -> Iterator[None]:
    """Draw in this look inside the block."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**rc(), "axes.prop_cycle": cycler(color=CYCLE)}):
        yield


def panels(
    count: int, width: float = 4.2, height: float = 3.4, columns: int | None = None
) -> tuple[Any, Any]:
    """Return a figure and its axes, ``count`` panels of inches, ``columns`` (None: all) side by side."""
    from matplotlib.figure import Figure

    wide = min(count, columns or count)
    rows = -(-count // wide)
    figure = Figure(figsize=(width * wide, height * rows), layout="constrained")
    return figure, figure.subplots(rows, wide, squeeze=False).flatten()


def colour_of(strategy: str, order: int = 0) -> str:
    """Return a strategy's colour; ``order`` distinguishes those that have none of their own."""
    own = STRATEGIES.get(strategy)
    return CYCLE[order % len(CYCLE)] if own is None else own[0]


def save(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Write a figure in the format of the name's ending, whole or not at all."""
    kind = path.suffix[1:].lower()
    write_whole(path, lambda stream: figure.savefig(stream, format=kind, dpi=dpi))
