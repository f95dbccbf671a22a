"""The report's plots: verdicts, price, size, phases, compression, roofline; no projection is in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lantern_accel.measure.record import PHASES, Distance, Interval, Quality, Run, is_measured
from lantern_accel.quality.interval import SAME
from lantern_accel.report.drawing import Figure, colour, draw_axes, note, strategy_role
from lantern_accel.report.names import short_device
from lantern_accel.report.offers import cell_of
from lantern_accel.report.record import Comparison, ModelSection
from lantern_accel.report.rows import Row, achieved_rates
from lantern_accel.report.verdict import at_setting
from lantern_accel.report.writing import as_sentence_list, times, upper

#: Of each run in a plot, and what its caption calls it.
MARKERS = {
    "o": "circles",
    "s": "squares",
    "^": "triangles",
    "D": "diamonds",
    "v": "wedges",
    "P": "P",
    "*": "*",
    "X": "X",
}


#: Where what has plain decoding's distribution stands on an axis of prices.
EXACT = Interval(value=0.0, low=0.0, high=0.0, n=1)


def figures(comparison: Comparison, runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Draw all plots of each model; a plot without data is left out."""
    names = {one.recorded_as: one.name for one in comparison.runs}
    runs = [run.model_copy(update={"name": names[run.name]}) for run in runs]
    sizes = _model_sizes(comparison, runs)
    found: dict[str, list[Figure]] = {}
    for section in comparison.models:
        made = found.setdefault(section.model, [])
        _verdicts(section, made)
        _distance(section, made)
        made += sizes.get(section.model, [])
        _throughput(section, made)
        _phases(section, made)
        _compression(section, made)
        _plot_moved(section, made)
        _roofline(section, [run for run in runs if run.settings.model == section.model], made)
    return found


# --- the plots that answer ----------------------------------------------------------------------


def _first_rows(section: ModelSection) -> list[Row]:
    """Return the rows of the first screen, run by run."""
    return [r for one in section.first.answers for r in at_setting(section.rows, one.run)]


def _compared_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that were held against plain decoding."""
    return [r for r in rows if isinstance(r.speedup, Interval) and r.strategy != "vanilla"]


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Name the rows of a plot, from the top down."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=colour("ink"))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _log_log(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(which="minor", visible=False)


def _verdicts(section: ModelSection, into: list[Figure]) -> None:
    """Draw every strategy's speed-up with its interval, and what follows from it."""
    rows = _compared_rows(_first_rows(section))
    if not rows:
        return
    several = len({row.run for row in rows}) > 1
    with draw_axes(
        into,
        "verdicts",
        "Does drafting pay?",
        "Filled: faster, slower, or the same speed (within the band). Hollow: not shown to be faster. "
        "The line at 1 is plain decoding.",
        height=0.75 + 0.27 * len(rows),
        wide=True,
    ) as axes:
        axes.axvspan(1 - SAME, 1 + SAME, color=colour("band"), lw=0)
        axes.axvline(1, color=colour("muted"), lw=0.8)
        most = max(_speedup(row).value for row in rows)
        for i, row in enumerate(rows):
            speed = _speedup(row)
            known = row.verdict in ("faster", "slower", "same")
            shade = colour(f"v-{row.verdict if known else 'ambiguous'}")
            axes.plot([speed.low, speed.high], [i, i], color=shade, lw=1.6)
            axes.plot(
                speed.value, i, "o", color=shade, ms=7, mfc=shade if known else colour("surface")
            )
            axes.annotate(
                times(speed),
                (1.0, i),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour("ink"),
            )
        _name_rows(axes, [f"{r.strategy}, {r.run}" if several else r.strategy for r in rows])
        # A sample that was held up must not flatten the picture: such an interval leaves the frame.
        axes.set_xlim(right=min(axes.get_xlim()[1], 2 * max(most, 1.0)))
        axes.set_xlabel("speed relative to plain decoding on the same device, 95 % interval")


def _model_sizes(comparison: Comparison, runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Draw plain and best speed over what a step reads, under the floor, for each device once.

    By the model below which the plot stands: the first of its device.
    """
    found: dict[str, list[Figure]] = {}
    devices: dict[tuple[str, str], list[tuple[Run, list[Row]]]] = {}
    for section in comparison.models:
        for run in (one for one in runs if one.settings.model == section.model):
            if rows := [r for r in at_setting(section.rows, run.name) if r.batch == 1]:
                key = run.environment.device.name, run.settings.dtype
                devices.setdefault(key, []).append((run, rows))
    for (device, _), measured in devices.items():
        ceilings = [run.ceilings for run, _ in measured if not isinstance(run.ceilings, str)]
        bandwidth = max((c.bandwidth for c in ceilings if is_measured(c.bandwidth)), default=None)
        points = [one for run, rows in measured for one in _size_points(run, rows)]
        if bandwidth is None or not points:
            continue
        every = [at for at, _, _, _ in points]
        if len(set(every)) < 2:
            continue  # a line through one point shows nothing
        with draw_axes(
            found.setdefault(measured[0][0].settings.model, []),
            f"sizes {device}",
            f"Speed over model size: {short_device(device)}",
            "The line is what the floor of a step allows plain decoding at batch 1: "
            f"{bandwidth / 1e9:.3g} GB/s, measured, over the bytes that a step reads. Drafting can lie "
            "above it.",
        ) as axes:
            ends = min(every) / 2, max(every) * 2
            axes.plot(ends, [bandwidth / at for at in ends], color=colour("muted"), lw=1)
            last = {model: (at, speed.value, name) for at, speed, name, model in points}
            for model, (at, height, name) in last.items():
                note(axes, f"{model}, up to {name}", (at, height))
            for at, speed, strategy, _ in points:
                shade = colour(strategy_role(strategy))
                axes.plot([at, at], [speed.low, speed.high], color=shade, lw=1)
                axes.plot(at, speed.value, "o", color=shade)
            _log_log(axes)
            axes.set_xlim(*ends)
            axes.margins(y=0.1)
            axes.xaxis.set_major_formatter(
                lambda at, _: f"{at / 1e9:g} GB" if at >= 1e9 else f"{at / 1e6:g} MB"
            )
            axes.yaxis.set_major_formatter(lambda at, _: f"{at:g}")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(lambda at, _: "")
            axes.set_xlabel("what a plain step reads")
            axes.set_ylabel("tokens per second")
    return found


def _size_points(run: Run, rows: Sequence[Row]) -> Iterator[tuple[float, Interval, str, str]]:
    """Yield bytes of a plain step, speed, strategy and model: plain decoding, and the fastest exact."""
    plain = next((row for row in rows if row.strategy == "vanilla"), None)
    work = "" if plain is None else cell_of(run, plain).work
    if plain is None or isinstance(work, str):
        return
    exact = [row for row in rows if not row.relaxed]
    best = max(exact, key=lambda row: row.tokens_per_second.value)
    for row in [plain, best] if best is not plain else [plain]:
        yield _step_bytes(work), row.tokens_per_second, row.strategy, run.settings.model


def _step_bytes(work: Mapping[str, Any]) -> float:
    return float(sum(one.bytes for name, one in work.items() if name != "prefill"))


# --- the plots of all rows ------------------------------------------------------------------------


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {run: [r for r in rows if r.run == run] for run in dict.fromkeys(r.run for r in rows)}


def _label(run: str, section: ModelSection) -> str:
    """Return what a title ends in: the run, where there are several."""
    return f": {run}" if len({row.run for row in section.rows}) > 1 else ""


def _throughput(section: ModelSection, into: list[Figure]) -> None:
    groups = _groups(section.rows)
    if not section.rows:
        return
    temperature = min((r.temperature for r in section.rows), key=lambda t: abs(t - 1))
    speeds = [r.tokens_per_second for r in section.rows]
    low, most = min(speed.value for speed in speeds), max(speed.value for speed in speeds)
    top = min(max(speed.high for speed in speeds), 1.5 * most)
    for run, all_rows in groups.items():
        rows = [r for r in all_rows if r.temperature == temperature]
        batches = sorted({r.batch for r in rows})
        names = list(dict.fromkeys(r.strategy for r in rows))
        if not rows:
            continue
        with draw_axes(
            into,
            f"throughput {run}",
            f"Throughput by batch{_label(run, section)}",
            f"Median, prefill included, temperature {temperature:g}; the line is the 95 % interval. "
            "All devices share one scale.",
        ) as axes:
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


def _phases(section: ModelSection, into: list[Figure]) -> None:
    for run, all_rows in _groups(section.rows).items():
        batch = min(r.batch for r in all_rows)
        rows = [
            r for r in all_rows if r.batch == batch and r.temperature == all_rows[0].temperature
        ]
        rows = [r for r in rows if is_measured(r.phase_ms["draft"])]
        if not rows:
            continue
        with draw_axes(
            into,
            f"phases {run}",
            f"Where the time goes{_label(run, section)}",
            f"Batch {batch}. The measured decoding time, split as "
            + (
                "the recorded step splits by the device's own clock."
                if rows[0].phases_from == "recording"
                else "the eager step splits when the device is waited for at every phase's edge."
            )
            + " Each device has its own scale.",
            height=0.9 + 0.36 * len(rows),
        ) as axes:
            for i, row in enumerate(rows):
                left = 0.0
                for phase in PHASES:
                    value = row.phase_ms[phase]
                    if is_measured(value):
                        shade = colour(f"p-{phase}")
                        axes.barh(i, value, 0.62, left=left, color=shade)
                        left += value
            _name_rows(axes, [r.strategy for r in rows])
            axes.set_xlabel("milliseconds per image")


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
    runs, markers = list(dict.fromkeys(row.run for row in rows)), [*MARKERS]
    lines: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    highest: dict[str, tuple[float, float]] = {}
    for row in sorted(rows, key=lambda row: row.batch):
        at, speed = x(row), y(row)
        shade = colour(strategy_role(row.strategy))
        axes.plot([at.low, at.high], [speed.value] * 2, color=shade, lw=1, alpha=0.55)
        axes.plot([at.value] * 2, [speed.low, speed.high], color=shade, lw=1, alpha=0.55)
        axes.plot(at.value, speed.value, markers[runs.index(row.run) % len(markers)], color=shade)
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
        note(axes, name, (x, at), (7, 3))
        placed.append((x, at))


def _runs_of(rows: Sequence[Row]) -> str:
    runs = list(dict.fromkeys(row.run for row in rows))
    words = [f"{name}: {run}" for name, run in zip(MARKERS.values(), runs, strict=False)]
    return f"{upper('; '.join(words))}." if len(runs) > 1 else ""


def _compression(section: ModelSection, into: list[Figure]) -> None:
    rows = _compared_rows(section.rows)
    if not rows:
        return
    with draw_axes(
        into,
        "compression",
        "Step compression against speed",
        "On the dashed line all of the compression becomes speed. A line joins the batch sizes of one "
        "device. " + _runs_of(rows),
    ) as axes:
        _points(axes, rows, lambda row: row.step_compression)
        most = max(row.step_compression.value for row in rows)
        axes.plot([1, most], [1, most], color=colour("muted"), lw=0.8, ls=(0, (4, 3)))
        axes.set_xlabel("tokens per step (step compression)")


def _plot_moved(section: ModelSection, into: list[Figure]) -> None:
    rows = [r for r in _compared_rows(section.rows) if r.moved is not None]
    if not any(row.relaxed for row in rows):
        return

    with draw_axes(
        into,
        "mass",
        "Speed against its price: total variation",
        "Exact strategies stand at 0. " + _runs_of(rows),
    ) as axes:
        _points(axes, rows, lambda row: row.total_variation or EXACT)
        axes.set_xlabel("total variation used per token (0 is exact)")


def _image_distance(row: Row) -> Interval:
    """Return how far a row's images are from plain decoding's."""
    distance = row.price.distance if isinstance(row.price, Quality) else None
    return distance.value if isinstance(distance, Distance) else EXACT


def _distance(section: ModelSection, into: list[Figure]) -> None:
    """Draw tokens per second of all strategies over the distance of their images from vanilla's."""
    rows = [r for r in _first_rows(section) if r.moved is not None]
    prices = [row.price for row in rows if isinstance(row.price, Quality)]
    found = [one.distance for one in prices if isinstance(one.distance, Distance)]
    if not found:
        return
    rows = [row for row in rows if not row.relaxed or _image_distance(row) is not EXACT]
    images = min(one.images for one in prices if isinstance(one.distance, Distance))
    low, high = min(one.floor.low for one in found), max(one.floor.high for one in found)

    with draw_axes(
        into,
        "distance",
        "Speed against the distance of the images",
        "Exact strategies have plain decoding's distribution, so they stand at 0. The band is the "
        f"distance of two sets of plain decoding: what chance gives at {images} images. "
        + _runs_of(rows),
    ) as axes:
        axes.axvspan(low, high, color=colour("band"), lw=0)
        _points(axes, rows, _image_distance, lambda row: row.tokens_per_second)
        axes.set_ylabel("tokens per second")
        metrics = as_sentence_list(list(dict.fromkeys(one.metric for one in found)))
        axes.set_xlabel(f"distance of the images from plain decoding's ({metrics})")


def _roofline(section: ModelSection, runs: Sequence[Run], into: list[Figure]) -> None:
    for run in runs:
        if isinstance(run.ceilings, str):
            continue
        bandwidth = run.ceilings.bandwidth
        flops = run.ceilings.matmul_flops.get(run.settings.dtype)
        cells = [(cell, achieved_rates(cell)) for cell in run.cells]
        points = [(cell, both) for cell, both in cells if both is not None and both[1]]
        if not points or not is_measured(bandwidth) or not is_measured(flops):
            continue
        with draw_axes(
            into,
            f"roofline {run.name}",
            f"Roofline{_label(run.name, section)}",
            f"The roof is this run's own: {bandwidth / 1e9:.3g} GB/s, {flops / 1e12:.3g} TFLOP/s in "
            f"{run.settings.dtype}. Distance below it is launches, small matrices and waiting.",
        ) as axes:
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
            _log_log(axes)
            axes.set_xlabel("operations per byte")
            axes.set_ylabel("FLOP/s")
