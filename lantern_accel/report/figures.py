"""The report's plots: verdicts, price, size, phases, compression, roofline; no projection is in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lantern_accel.measure.record import PHASES, Distance, Interval, Quality, Run, is_measured
from lantern_accel.report.comparison import Comparison, ModelSection
from lantern_accel.report.drawing import Figure, colour, drawing, note, strategy_role
from lantern_accel.report.first_figures import first_rows, model_sizes, verdicts
from lantern_accel.report.rows import Row, achieved_rates
from lantern_accel.report.writing import listed

MARKERS = "os^DvP*X"


def figures(comparison: Comparison, runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Draw all plots of each model; a plot without data is left out."""
    found = {}
    names = {one.recorded_as: one.name for one in comparison.runs}
    runs = [run.model_copy(update={"name": names[run.name]}) for run in runs]
    sizes = model_sizes(comparison, runs)
    for section in comparison.models:
        mine = [run for run in runs if run.settings.model == section.model]
        found[section.model] = [
            *verdicts(section),
            *_distance(section),
            *sizes.pop(section.model, []),
            *_throughput(section),
            *_phases(section),
            *_compression(section),
            *_moved(section),
            *_roofline(section, mine),
        ]
    return found


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.run, []).append(row)
    return groups


def _label(run: str, section: ModelSection) -> str:
    """Return what a title ends in: the run, where there are several."""
    return f": {run}" if len({row.run for row in section.rows}) > 1 else ""


def _throughput(section: ModelSection) -> Iterator[Figure]:
    groups = _groups(section.rows)
    temperature = min((r.temperature for r in section.rows), default=0.0, key=lambda t: abs(t - 1))
    most = max((r.tokens_per_second.value for r in section.rows), default=1.0)
    top = min(max((r.tokens_per_second.high for r in section.rows), default=1.0), 1.5 * most)
    low = min((r.tokens_per_second.value for r in section.rows), default=1.0)
    for run, all_rows in groups.items():
        rows = [r for r in all_rows if r.temperature == temperature]
        batches = sorted({r.batch for r in rows})
        names = list(dict.fromkeys(r.strategy for r in rows))
        if not rows:
            continue
        with drawing(f"throughput {run}") as (axes, out):
            width = 0.8 / len(names)
            for i, name in enumerate(names):
                for row in (r for r in rows if r.strategy == name):
                    x = batches.index(row.batch) + (i - (len(names) - 1) / 2) * width
                    speed = row.tokens_per_second
                    axes.bar(x, speed.value, width * 0.86, color=colour(strategy_role(name)))
                    axes.plot([x, x], [speed.low, speed.high], color=colour("ink"), lw=1)
            axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
            axes.grid(axis="x", visible=False)
            axes.set_ylabel("tokens per second")
            if top > 30 * low and len(groups) > 1:
                axes.set_yscale("log")
            axes.set_ylim(top=top * 1.08)
        yield Figure(
            out[0],
            f"Throughput by batch{_label(run, section)}",
            f"Median, prefill included, temperature {temperature:g}; the line is the 95 % interval. "
            "All devices share one scale.",
        )


def _phases(section: ModelSection) -> Iterator[Figure]:
    for run, all_rows in _groups(section.rows).items():
        batch = min(r.batch for r in all_rows)
        rows = [
            r for r in all_rows if r.batch == batch and r.temperature == all_rows[0].temperature
        ]
        rows = [r for r in rows if is_measured(r.phase_ms["draft"])]
        if not rows:
            continue
        with drawing(f"phases {run}", 0.9 + 0.36 * len(rows)) as (axes, out):
            for i, row in enumerate(rows):
                left = 0.0
                for phase in PHASES:
                    value = row.phase_ms[phase]
                    if is_measured(value):
                        shade = colour(f"p-{phase}")
                        axes.barh(i, value, 0.62, left=left, color=shade)
                        left += value
            axes.set_yticks(range(len(rows)), [r.strategy for r in rows])
            axes.tick_params(axis="y", labelcolor=colour("ink"))
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_xlabel("milliseconds per image")
        yield Figure(
            out[0],
            f"Where the time goes{_label(run, section)}",
            f"Batch {batch}. The measured decoding time, split as "
            + (
                "the recorded step splits by the device's own clock."
                if rows[0].phases_from == "recording"
                else "the eager step splits when the device is waited for at every phase's edge."
            )
            + " Each device has its own scale.",
        )


def _speedup(row: Row) -> Interval:
    assert isinstance(row.speedup, Interval)
    return row.speedup


def _points(
    axes: Any,
    rows: Sequence[Row],
    x: Callable[[Row], Interval],
    y: Callable[[Row], Interval] = _speedup,
) -> None:
    """Draw ``y`` over ``x`` with both intervals; one marker per run, one colour per strategy.

    A line joins a strategy's batch sizes on one device; the fastest point of a strategy is labelled.
    """
    runs = list(dict.fromkeys(row.run for row in rows))
    lines: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    highest: dict[str, tuple[float, float]] = {}
    for row in sorted(rows, key=lambda row: row.batch):
        at, speed = x(row), y(row)
        shade = colour(strategy_role(row.strategy))
        axes.plot([at.low, at.high], [speed.value] * 2, color=shade, lw=1, alpha=0.55)
        axes.plot([at.value] * 2, [speed.low, speed.high], color=shade, lw=1, alpha=0.55)
        axes.plot(at.value, speed.value, MARKERS[runs.index(row.run) % len(MARKERS)], color=shade)
        point = at.value, speed.value
        lines.setdefault((row.run, row.strategy, row.temperature), []).append(point)
        highest[row.strategy] = max(highest.get(row.strategy, point), point, key=lambda p: p[1])
    for (_, strategy, _), points in lines.items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour(strategy_role(strategy)), lw=0.8, alpha=0.7)
    if y is _speedup:
        axes.axhline(1, color=colour("muted"), lw=0.8)
        axes.set_ylabel("speed relative to plain decoding")
    axes.margins(x=0.16, y=0.16)
    # A sample that was held up must not flatten the picture: such an interval leaves the frame.
    fastest = max(y(row).value for row in rows)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 2 * max(fastest, 1.0 if y is _speedup else 0.0)))
    _name_points(axes, highest)


def _name_points(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Write names beside points; where several stand one above another, apart from each other."""
    wide, high = (np.ptp(limits) for limits in (axes.get_xlim(), axes.get_ylim()))
    line = 0.06 * high  # a line of type, in units of the axis
    placed: list[tuple[float, float]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        at = y
        for a, b in placed:  # from the top down
            if abs(x - a) < 0.2 * wide and at > b - line:
                at = b - line
        axes.annotate(
            name,
            (x, at),
            textcoords="offset points",
            xytext=(7, 3),
            fontsize=7.5,
            color=colour("ink"),
        )
        placed.append((x, at))


def _runs_of(rows: Sequence[Row]) -> str:
    runs = list(dict.fromkeys(row.run for row in rows))
    names = {"o": "circles", "s": "squares", "^": "triangles", "D": "diamonds", "v": "wedges"}
    words = [f"{names.get(m, m)}: {run}" for m, run in zip(MARKERS, runs, strict=False)]
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}." if len(runs) > 1 else ""


def _compression(section: ModelSection) -> Iterator[Figure]:
    rows = [r for r in section.rows if isinstance(r.speedup, Interval) and r.strategy != "vanilla"]
    if not rows:
        return
    with drawing("compression") as (axes, out):
        _points(axes, rows, lambda row: row.step_compression)
        most = max(row.step_compression.value for row in rows)
        axes.plot([1, most], [1, most], color=colour("muted"), lw=0.8, ls=(0, (4, 3)))
        axes.set_xlabel("tokens per step (step compression)")
    yield Figure(
        out[0],
        "Step compression against speed",
        "On the dashed line all of the compression becomes speed. A line joins the batch sizes of one "
        "device. " + _runs_of(rows),
    )


def _exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value, n=1)


def _moved(section: ModelSection) -> Iterator[Figure]:
    priced = [r for r in section.rows if isinstance(r.speedup, Interval) and r.moved is not None]
    rows = [r for r in priced if r.strategy != "vanilla"]
    if not any(row.relaxed for row in rows):
        return

    def moved(row: Row) -> Interval:
        return row.total_variation or _exactly(0.0)

    with drawing("mass") as (axes, out):
        _points(axes, rows, moved)
        axes.set_xlabel("total variation used per token (0 is exact)")
    yield Figure(
        out[0],
        "Speed against its price: total variation",
        "Exact strategies stand at 0. " + _runs_of(rows),
    )


def _distance(section: ModelSection) -> Iterator[Figure]:
    """Draw tokens per second of all strategies over the distance of their images from vanilla's."""
    rows = [r for r in first_rows(section) if r.moved is not None]
    found = {
        id(row): row.price.distance
        for row in rows
        if isinstance(row.price, Quality) and isinstance(row.price.distance, Distance)
    }
    rows = [row for row in rows if not row.relaxed or id(row) in found]
    if not found:
        return
    floors = [one.floor for one in found.values()]
    low, high = min(f.low for f in floors), max(f.high for f in floors)

    def far(row: Row) -> Interval:
        return found[id(row)].value if id(row) in found else _exactly(0.0)

    with drawing("distance") as (axes, out):
        axes.axvspan(low, high, color=colour("band"), lw=0)
        _points(axes, rows, far, lambda row: row.tokens_per_second)
        axes.set_ylabel("tokens per second")
        metrics = listed(list(dict.fromkeys(one.metric for one in found.values())))
        axes.set_xlabel(f"distance of the images from plain decoding's ({metrics})")
    images = min(row.price.images for row in rows if isinstance(row.price, Quality))
    yield Figure(
        out[0],
        "Speed against the distance of the images",
        "Exact strategies have plain decoding's distribution, so they stand at 0. The band is the "
        f"distance of two sets of plain decoding: what chance gives at {images} images. "
        + _runs_of(rows),
    )


def _roofline(section: ModelSection, runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        if isinstance(run.ceilings, str):
            continue
        bandwidth = run.ceilings.bandwidth
        flops = run.ceilings.matmul_flops.get(run.settings.dtype)
        cells = [(cell, achieved_rates(cell)) for cell in run.cells]
        points = [(cell, both) for cell, both in cells if both is not None and both[1]]
        if not points or not is_measured(bandwidth) or not is_measured(flops):
            continue
        with drawing(f"roofline {run.name}") as (axes, out):
            intensities = [both[0] / both[1] for _, both in points]
            ridge = flops / bandwidth
            low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
            axes.plot(
                [low, ridge, high], [low * bandwidth, flops, flops], color=colour("ink"), lw=1.2
            )
            highest: dict[int, tuple[float, float]] = {}
            for cell, both in points:
                done, moved = both
                shade = colour(strategy_role(cell.strategy.name))
                point = done / moved, done
                axes.plot(*point, "o", color=shade)
                before = highest.get(cell.batch, point)
                highest[cell.batch] = max(before, point, key=lambda p: p[1])
            for batch, point in highest.items() if len(highest) > 1 else ():
                note(axes, f"batch {batch}", point)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.grid(which="minor", visible=False)
            axes.set_xlabel("operations per byte")
            axes.set_ylabel("FLOP/s")
        yield Figure(
            out[0],
            f"Roofline{_label(run.name, section)}",
            f"The roof is this run's own: {bandwidth / 1e9:.3g} GB/s, {flops / 1e12:.3g} TFLOP/s in "
            f"{run.settings.dtype}. Distance below it is launches, small matrices and waiting.",
        )
