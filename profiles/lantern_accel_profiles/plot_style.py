"""Gives every plot one look: colours of strategies and verdicts, type and grid.

Light and printable. Colours are Okabe and Ito's, which most colour-blind readers can distinguish, and no
plot says by colour alone what it says. The page of a report has a second set
for dark screens. matplotlib is an extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.errors import RequestError
from lantern_accel.files import check_target, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def rc() -> Any:
    """Return matplotlib's settings."""
    return {
        "font.size": 8.5,
        "axes.titlesize": 9.5,
        "axes.edgecolor": RULE,
        "axes.labelcolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "grid.color": RULE,
        "grid.linewidth": 0.5,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "text.color": INK,
        **{f"{axis}tick.color": MUTED for axis in "xy"},
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
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, ``count`` panels of inches, ``columns`` (None: all) side by side."""
    from matplotlib.figure import Figure

    wide = min(count, columns or count)
    rows = -(-count // wide)
    figure = Figure(figsize=(width * wide, height * rows), layout="constrained")
    return figure, figure.subplots(rows, wide, squeeze=False).flatten().tolist()


def colour_of(strategy: str, order: int = 0) -> str:
    """Return a strategy's colour; ``order`` distinguishes those that have none of their own."""
    own = STRATEGIES.get(strategy)
    return CYCLE[order % len(CYCLE)] if own is None else own[0]


def save(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Write a figure in the format of the name's ending, whole or not at all."""
    kind = path.suffix[1:].lower()
    write_whole(path, lambda stream: figure.savefig(stream, format=kind, dpi=dpi))


# --- speed over quality loss --------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Raise RequestError before any work where a plot cannot be written to ``path``."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise RequestError(f"{path} has no format for a plot; name it .png or .svg")
    check_target(path)
    try:
        import matplotlib  # noqa: F401, asked for before minutes of measuring
    except ImportError:
        raise RequestError('plots need matplotlib; pip install "lantern-accel[report]"') from None


def write_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the speed-up of each row over its total variation per token, with 95 % intervals."""
    with plot_style():
        figure, (axis, *_) = panels(1, width=6.4, height=4.2)
        for number, row in enumerate(rows):
            x, y = row["total_variation_per_token"], row["speedup"] or 1.0
            low, high = row["speedup_interval"] or (y, y)
            name = str(row["strategy"])
            colour = colour_of(name.partition(":")[0], number)
            axis.errorbar(x, y, [[y - low], [high - y]], fmt="o", color=colour, linewidth=0.8)
            batch = f", batch {row['batch']}" if len({one["batch"] for one in rows}) > 1 else ""
            axis.annotate(f"{name}{batch}", (x, y), fontsize=7, xytext=(5, 4), color=INK,
                          textcoords="offset points")  # fmt: skip
        axis.set_xlabel("total variation per token, 0: exact")
        axis.set_ylabel("speed of decoding over plain decoding")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.25)
        save(figure, path)
