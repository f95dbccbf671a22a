"""Plots speed over quality loss: what each setting of a relaxed strategy gains and changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.errors import RequestError
from lantern_accel.files import check_target
from lantern_accel_profiles.plot_style import INK, colour_of, panels, plot_style, save


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
