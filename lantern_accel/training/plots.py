"""Curves of a run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lantern_accel.quality import style


def save_curves(curve: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Plot each figure of ``curve`` over ``step`` in its own panel; return False without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    names = sorted({name for point in curve for name in point} - {"step"})
    if not names:
        return False
    with style.styled():
        figure, axes = style.panels(len(names), width=3.6, height=3.0)
        for axis, name in zip(axes, names, strict=True):
            points = [(point["step"], point[name]) for point in curve if name in point]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3)
            axis.set_xlabel("step")
            axis.set_title(name)
            axis.grid(True)
        style.save(figure, path)
    return True
