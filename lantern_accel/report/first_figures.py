"""The plots that answer: every strategy's verdict, and speed over model size under the floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lantern_accel.measure.intervals import SAME
from lantern_accel.measure.record import Interval, Run, is_measured
from lantern_accel.report import projection
from lantern_accel.report.answer import at_setting
from lantern_accel.report.comparison import Comparison, ModelSection
from lantern_accel.report.drawing import WIDTH, Figure, colour, drawing, note, strategy_role
from lantern_accel.report.names import short_device
from lantern_accel.report.offers import cell_of
from lantern_accel.report.rows import Row
from lantern_accel.report.writing import times


def first_rows(section: ModelSection) -> list[Row]:
    """Return the rows of the first screen, run by run."""
    return [r for one in section.first.answers for r in at_setting(section.rows, one.run)]


def verdicts(section: ModelSection) -> Iterator[Figure]:
    """Draw every strategy's speed-up with its interval, and what follows from it."""
    rows = [r for r in first_rows(section) if isinstance(r.speedup, Interval)]
    rows = [r for r in rows if r.strategy != "vanilla"]
    if not rows:
        return
    several = len({row.run for row in rows}) > 1
    with drawing("verdicts", 0.75 + 0.27 * len(rows), 2 * WIDTH) as (axes, out):
        axes.axvspan(1 - SAME, 1 + SAME, color=colour("band"), lw=0)
        axes.axvline(1, color=colour("muted"), lw=0.8)
        most = max(row.speedup.value for row in rows if isinstance(row.speedup, Interval))
        for i, row in enumerate(rows):
            speed = row.speedup
            assert isinstance(speed, Interval)
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
        names = [f"{r.strategy}, {r.run}" if several else r.strategy for r in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", labelcolor=colour("ink"))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        # A sample that was held up must not flatten the picture: such an interval leaves the frame.
        axes.set_xlim(right=min(axes.get_xlim()[1], 2 * max(most, 1.0)))
        axes.set_xlabel("speed relative to plain decoding on the same device, 95 % interval")
    yield Figure(
        out[0],
        "Does drafting pay?",
        "Filled: faster, slower, or the same speed (within the band). Hollow: not shown to be faster. "
        "The line at 1 is plain decoding.",
        wide=True,
    )


def model_sizes(comparison: Comparison, runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Draw plain and best speed over what a step reads, under the floor, for each device once.

    By the model below which the plot stands: the first of its device.
    """
    found: dict[str, list[Figure]] = {}
    devices: dict[tuple[str, str], list[tuple[Run, list[Row]]]] = {}
    for section in comparison.models:
        for run in runs:
            rows = [r for r in at_setting(section.rows, run.name) if r.batch == 1]
            if run.settings.model == section.model and rows:
                key = run.environment.device.name, run.settings.dtype
                devices.setdefault(key, []).append((run, rows))
    for (device, dtype), measured in devices.items():
        bandwidths = [
            run.ceilings.bandwidth
            for run, _ in measured
            if not isinstance(run.ceilings, str) and is_measured(run.ceilings.bandwidth)
        ]
        points = [one for run, rows in measured for one in _size_points(run, rows)]
        if not bandwidths or not points:
            continue
        bandwidth = max(bandwidths)
        width = {"float32": 2.0}.get(dtype, 1.0)
        published = {
            name: width * _step_bytes(projection.size_work(name)["vanilla"])
            for name in projection.SIZES
        }
        every = [at for at, _, _, _ in points] + list(published.values())
        if len(set(every)) < 2:
            continue  # a line through one point shows nothing
        with drawing(f"sizes {device}") as (axes, out):
            ends = min(every) / 2, max(every) * 2
            axes.plot(ends, [bandwidth / at for at in ends], color=colour("muted"), lw=1)
            for name, at in published.items():
                axes.plot(at, bandwidth / at, "s", mfc=colour("surface"), mec=colour("muted"))
                note(axes, name, (at, bandwidth / at))
            last = {model: (at, speed.value, name) for at, speed, name, model in points}
            for model, (at, height, name) in last.items():
                note(axes, f"{model}, up to {name}", (at, height))
            for at, speed, strategy, _ in points:
                shade = colour(strategy_role(strategy))
                axes.plot([at, at], [speed.low, speed.high], color=shade, lw=1)
                axes.plot(at, speed.value, "o", color=shade)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.grid(which="minor", visible=False)
            axes.set_xlim(*ends)
            axes.margins(y=0.1)
            axes.xaxis.set_major_formatter(lambda at, _: _bytes_word(at))
            axes.yaxis.set_major_formatter(lambda at, _: f"{at:g}")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(lambda at, _: "")
            axes.set_xlabel("what a plain step reads")
            axes.set_ylabel("tokens per second")
        figure = Figure(
            out[0],
            f"Speed over model size: {short_device(device)}",
            "The line is what the floor of a step allows plain decoding at batch 1: "
            f"{bandwidth / 1e9:.3g} GB/s, measured, over the bytes that a step reads. Drafting can lie "
            "above it. Hollow squares are published sizes on that line: nobody measured them here.",
        )
        found.setdefault(measured[0][0].settings.model, []).append(figure)
    return found


def _size_points(run: Run, rows: Sequence[Row]) -> Iterator[tuple[float, Interval, str, str]]:
    """Yield bytes of a plain step, speed, strategy and model: plain decoding, and the fastest exact."""
    plain = next((row for row in rows if row.strategy == "vanilla"), None)
    work = "" if plain is None else cell_of(run, plain).work
    if plain is None or isinstance(work, str):
        return
    exact = [row for row in rows if not row.relaxed]
    best = max(exact, key=lambda row: row.tokens_per_second.value)
    for row in dict.fromkeys(one.strategy for one in (plain, best)):
        chosen = plain if row == plain.strategy else best
        yield _step_bytes(work), chosen.tokens_per_second, row, run.settings.model


def _bytes_word(count: float) -> str:
    return f"{count / 1e9:g} GB" if count >= 1e9 else f"{count / 1e6:g} MB"


def _step_bytes(work: Mapping[str, Any]) -> float:
    return float(sum(one.bytes for name, one in work.items() if name != "prefill"))
