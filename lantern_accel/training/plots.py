"""Curves of a run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.files import write_whole


def save_curves(curve: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Plot each figure of ``curve`` over ``step`` in its own panel; return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = sorted({name for point in curve for name in point} - {"step"})
    if not names:
        return False
    figure = Figure(figsize=(3.6 * len(names), 3.0), layout="constrained")
    axes: Any = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        points = [(point["step"], point[name]) for point in curve if name in point]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3)
        axis.set_xlabel("step")
        axis.set_title(name)
        axis.grid(alpha=0.3)
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=110))
    return True
