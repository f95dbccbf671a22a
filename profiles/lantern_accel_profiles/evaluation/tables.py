"""An evaluation as tables in a Markdown file: the papers' tables and plot, then the parts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_accel import files
from lantern_accel.errors import DataError
from lantern_accel.records import NOT_MEASURED, markdown_table
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.evaluation.schema import Evaluation, Metric, Scored, Suite
from lantern_accel_profiles.plot_style import INK, MUTED, colour_of, panels, plot_style, save
from lantern_accel_profiles.quality.interval import Interval, reciprocal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Digits after the point, by column.
_DIGITS = {"precision": 3, "recall": 3, "hpsv2": 4, "total_variation_per_token": 4}
DASH = "—"
#: What a table says of the real images.
REFERENCE = {"images": "Real images", "left_out": "Left out", "not_rgb": "Turned into RGB"}
#: Panels in one row of the plot.
COLUMNS = 3


@dataclass
class Table:
    """A table: heads and cells as text, with notes below."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def check_targets(out: Path) -> None:
    """Refuse a name whose tables would be written over itself, or cannot be written."""
    if out.suffix.lower() in (".md", ".png"):
        raise DataError(f"-o {out} is the name of a table; end it in .json, tables go next to it")
    files.check_targets(out, out.with_suffix(".md"), out.with_suffix(".png"))


def write_tables(report: Evaluation, out: Path) -> None:
    """Write the tables next to ``out``, and where matplotlib is installed a plot that they show."""
    found = list(tables(report.suite)) if report.suite is not None else []
    text = f"# {report.model} on {report.environment.get('device', 'a device')}\n\n"
    name = out.with_suffix(".png")
    if report.suite is not None and write_plot(report.suite, name):
        text += f"![Speed against quality; hollow: dominated]({name.name})\n\n"
    files.write_whole(out.with_suffix(".md"), text + markdown([*found, *first_experiments(report)]))


def markdown(found: Sequence[Table]) -> str:
    """Return tables as Markdown."""
    parts = []
    for one in found:
        lines = [f"## {one.title}", "", *markdown_table(one.heads, one.rows), ""]
        parts.append("\n".join([*lines, *(f"- {note}" for note in one.notes)]).rstrip())
    return "\n\n".join(parts) + "\n"


# --- the plot of a suite ---------------------------------------------------------------------------


def points(suite: Suite, metric: Metric) -> list[tuple[Scored, Interval, Interval]]:
    """Return the strategies that have both figures, with their images per second and this figure."""
    found = []
    for row in suite.rows:
        seconds, value = row.speed.seconds_per_image, row.metrics.get(metric.key)
        if isinstance(seconds, Interval) and isinstance(value, Interval) and seconds.low > 0:
            found.append((row, reciprocal(seconds), value))
    return found


def write_plot(suite: Suite, path: Path) -> bool:
    """Write the plot; False where there is nothing to plot, or no matplotlib."""
    shown = [(metric, points(suite, metric)) for metric in suite.columns]
    shown = [(metric, found) for metric, found in shown if len(found) > 1]
    if not shown or importlib.util.find_spec("matplotlib") is None:
        return False
    with plot_style():
        figure, axes = panels(len(shown), columns=COLUMNS)
        for axis, (metric, found) in zip(axes, shown, strict=False):
            _panel(axis, metric, found)
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        save(figure, path)
    return True


def _panel(axis: Axes, metric: Metric, found: Sequence[tuple[Scored, Interval, Interval]]) -> None:
    """Draw one figure over speed; dominated: another value is as good in both and better in one.

    Two values that differ by less than their intervals may change places.
    """
    sign = 1.0 if metric.better == "higher" else -1.0
    places = [(speed.value, sign * value.value) for _, speed, value in found]
    for i, ((row, x, y), (fast, good)) in enumerate(zip(found, places, strict=True)):
        dominated = any(a >= fast and b >= good and (a, b) != (fast, good) for a, b in places)
        colour = colour_of(row.strategy.name if row.strategy else "", i)
        # Of a bootstrap, whose ends may lie on one side of a value by rounding.
        xerr, yerr = ([[max(v.value - v.low, 0)], [max(v.high - v.value, 0)]] for v in (x, y))
        face, ink = ("white", MUTED) if dominated else (colour, INK)
        axis.errorbar(x.value, y.value, xerr=xerr, yerr=yerr, fmt="o", color=colour,
                      markerfacecolor=face, linewidth=0.8)  # fmt: skip
        text = f"{row.label} (dominated)" if dominated else row.label
        axis.annotate(text, (x.value, y.value), fontsize=7, xytext=(4, 4),
                      textcoords="offset points", color=ink)  # fmt: skip
    if metric.better == "lower":
        axis.invert_yaxis()
    axis.set_xlabel("images per second")
    axis.set_title(f"{metric.title} (up is better)")
    axis.grid(True)
    axis.margins(0.2)


# --- the parts -------------------------------------------------------------------------------------

#: The tables of an evaluation's parts: a title, and for each column its field and digits.
PARTS: dict[str, tuple[str, dict[str, tuple[str, int | None]]]] = {
    "likelihood": (
        "Likelihood",
        {"images": ("images", 0), "count": ("count", 0), "nats per token": ("nll", 3)},
    ),
    "ambiguity": (
        "Token selection ambiguity",
        {"of": ("of", 0), "guidance": ("cfg", None), "top-1": ("top1_mean", 3),
         "top-10 mass": ("top10_mass", 3), "entropy, nats": ("entropy", 2)},
    ),
    "interchange": (
        "Interchangeable codes",
        {"every code replaced by": ("replaced_by", 0), "PSNR, dB": ("psnr", 1),
         "feature distance": ("feature_distance", 4)},
    ),
    "frontier": (
        "Tokens per step and the true total variation",
        {"strategy": ("strategy", 0), "tokens per step": ("step_compression", 2),
         "TV per token": ("total_variation_per_token", 4)},
    ),
    "distances": (
        "Distance to exact decoding",
        {"strategy": ("strategy", 0), "KID x 1000": ("kid", 1), "p": ("p_value", 2),
         "equal tokens, greedy": ("greedy_same_tokens", 2)},
    ),
}  # fmt: skip


def figure_text(value: object, places: int | None, unit: str = "") -> str:
    """Return a figure as a table shows it, with its interval; a dash where it was not measured.

    One sample has no interval. ``places`` after the point; None: as many digits as it needs.
    """
    if isinstance(value, Strategy):
        return in_words(value)
    if isinstance(value, Interval):
        figure, low, high = (f"{x:.{places or 0}f}" for x in (value.value, value.low, value.high))
        return f"{figure}{unit} [{low}, {high}]" if value.n > 1 else f"{figure}{unit}"
    if isinstance(value, float):
        return (f"{value:g}" if places is None else f"{value:.{places}f}") + unit
    return DASH if value is None or str(value).startswith(NOT_MEASURED) else str(value)


def first_experiments(report: Evaluation) -> Iterator[Table]:
    """Yield the tables of the parts that were measured."""
    for part, (title, columns) in PARTS.items():
        if found := getattr(report, part):
            fields = columns.values()
            rows = [
                [figure_text(getattr(row, name), places) for name, places in fields]
                for row in found
            ]
            yield Table(title, list(columns), rows)


def in_words(strategy: Strategy) -> str:
    """Return a strategy's name with what its acceptance rule and budget are set to."""
    words = [strategy.name]
    rule = strategy.acceptance.model_dump(exclude={"kind"}) if strategy.acceptance.relaxed else {}
    words += [f"{key} {value:g}" for key, value in rule.items() if isinstance(value, int | float)]
    if strategy.tv_budget is not None:
        words.append(f"budget {strategy.tv_budget:g}")
    return ", ".join(words)


# --- suites ----------------------------------------------------------------------------------------


def tables(suite: Suite) -> list[Table]:
    """Return the measured table, how it was measured, and the published rows."""
    measured = [
        column
        for column in suite.columns
        if any(isinstance(row.metrics.get(column.key), Interval) for row in suite.rows)
    ]
    heads = ["strategy", "s per image", "speed-up", "tokens per step", "TV per token"]
    heads += [f"{column.title} {'↓' if column.better == 'lower' else '↑'}" for column in measured]
    rows = []
    for row in suite.rows:
        s = row.speed
        speed = ((s.seconds_per_image, 3, ""), (s.speedup, 2, "x"), (s.tokens_per_step, 2, ""),
                 (s.total_variation_per_token, 4, ""))  # fmt: skip
        cells = [figure_text(*figure) for figure in speed]
        cells += [figure_text(row.metrics.get(c.key), _DIGITS.get(c.key, 2)) for c in measured]
        rows.append([row.label, *cells])
    name = {"coco": "MS-COCO", "imagenet": "ImageNet", "prompts": suite.prompts_source}[suite.name]
    title = f"{name}, {suite.count} images per strategy, seed {suite.seed}"
    title += f", protocol {suite.protocol.name}"
    found = [Table(title, heads, rows, _notes(suite))]
    columns = [[c.title, c.network, c.preprocessing or DASH, c.note or DASH] for c in suite.columns]
    found.append(Table("How it is measured", ["figure", "network", "images", "note"], columns))
    return [*found, _published_table(suite)] if suite.published else found


def _notes(suite: Suite) -> list[str]:
    """Return what a reader of the table must know: intervals, bias, and what was not measured."""
    notes = [
        "FID of few images is too high; FID less FID-infinity estimates by how much.",
        "In brackets: 95 % bootstrap intervals, over images for quality and over chunks of "
        f"{suite.chunk} images for speed (batch {suite.batch}). Speed is that of these images, "
        "one strategy after another; `lantern-accel profile` measures it interleaved.",
        "TV per token: the total variation that relaxation may have moved, and what quantized weights "
        "add; 0 for exact strategies on the model's own weights.",
    ]
    if suite.prompts_cut:
        notes.append(
            f"{suite.prompts_cut} prompts are longer than the model's prefix and were cut."
        )
    for key, title in REFERENCE.items():
        if value := suite.reference.get(key):
            parts = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [value]
            notes.append(f"{title}: {'; '.join(map(str, parts))}.")
    reasons: dict[str, list[str]] = {}
    for row in suite.rows:
        figures = {column.title: row.metrics.get(column.key) for column in suite.columns}
        figures |= {"speed-up": row.speed.speedup, "s per image": row.speed.seconds_per_image}
        for title, figure in figures.items():
            if isinstance(figure, str):
                reasons.setdefault(figure.removeprefix(NOT_MEASURED), []).append(title)
    return notes + [
        f"Not measured: {', '.join(dict.fromkeys(of))} ({why})." for why, of in reasons.items()
    ]


def _published_table(suite: Suite) -> Table:
    titles = {column.key: column.title for column in suite.columns}
    keys = [key for key in titles if any(key in row.metrics for row in suite.published)]
    heads = ["method", "model", "exact", "drafter", "speed-up", "tokens per step"]
    rows = [
        [
            row.method,
            row.model + (f", {row.hardware}" if row.hardware else ""),
            "yes" if row.exact else "no",
            "yes" if row.drafter else "no",
            figure_text(row.speedup, 2, "x"),
            figure_text(row.tokens_per_step, 2),
            *(figure_text(row.metrics.get(key), 2) for key in keys),
            "; ".join(part for part in (row.source, row.note) if part),
        ]
        for row in suite.published
    ]
    note = (
        "Other models, cards, code and protocols: their values are a yardstick for ratios, not for the "
        "table above."
    )
    heads += [*(titles[key] for key in keys), "source"]
    return Table("Published by others", heads, rows, [note])
