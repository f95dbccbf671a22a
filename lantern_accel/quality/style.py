"""One look for all plots that are files: colours of strategies, type, grid; matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lantern_accel.errors import DataError
from lantern_accel.files import write_whole

INK, MUTED, BAR = "#222222", "#6b7280", "#4878a8"
#: Okabe and Ito's colours, which most colour-blind readers can distinguish.
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
#: What strategies look like wherever they are drawn; others take the rest of the cycle in turn.
STRATEGY = {
    "vanilla": "#000000",
    "eagle": "#56b4e9",
    "eagle2": "#0072b2",
    "lantern": "#d55e00",
    "lantern++": "#e69f00",
    "auto": "#009e73",
}
_RC: Any = {
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.markersize": 5.0,
}


def check_matplotlib(needed_by: str = "--plots") -> None:
    """Raise :class:`DataError` where matplotlib is not installed; call it before measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DataError(
            f"{needed_by} needs matplotlib, which is not installed; `pip install lantern-accel[eval]` "
            "brings it. Or leave it out: the same command with it draws the plots later"
        ) from None


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this look inside the block."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**_RC, "axes.prop_cycle": cycler(color=CYCLE)}):
        yield


def panels(count: int, width: float = 4.2, height: float = 3.4) -> tuple[Any, Any]:
    """Return a figure and its axes, ``count`` panels side by side, inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def colour_of(strategy: str, order: int = 0) -> str:
    """Return a strategy's colour; ``order`` distinguishes those that have none of their own."""
    return STRATEGY.get(strategy, CYCLE[order % len(CYCLE)])


def save(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a figure as PNG, whole or not at all."""
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=dpi))
