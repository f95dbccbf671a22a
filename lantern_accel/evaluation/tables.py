"""An evaluation as tables in three files: the papers' tables first, then their first experiments."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from lantern_accel.errors import DataError
from lantern_accel.evaluation import plots
from lantern_accel.evaluation.schema import Evaluation, Reading, Suite
from lantern_accel.files import check_target, write_whole
from lantern_accel.quality.interval import Interval
from lantern_accel.records import NOT_MEASURED, markdown_table
from lantern_accel.strategy.values import Strategy

#: Digits after the point, by column.
_DIGITS = {"precision": 3, "recall": 3, "hpsv2": 4, "imagereward": 3, "total_variation": 4}
DASH = "—"


@dataclass
class Table:
    """A table: heads and cells as text, with notes below."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


# --- files -----------------------------------------------------------------------------------------

SUFFIXES = (".md", ".tex", ".html")


def targets(out: Path) -> list[Path]:
    """Return the files of tables that belong to an evaluation's JSON."""
    return [out.with_suffix(suffix) for suffix in SUFFIXES]


def check_targets(out: Path) -> None:
    """Refuse a name whose tables would be written over itself, or cannot be written."""
    if out.suffix.lower() in SUFFIXES:
        raise DataError(f"-o {out} is the name of a table; end it in .json, tables go next to it")
    for path in (out, *targets(out)):
        check_target(path)


def write_tables(report: Evaluation, out: Path) -> list[Path]:
    """Write the tables next to ``out``; the page has plots where matplotlib is installed."""
    found = all_tables(report)
    title = f"{report.model} on {report.environment.get('device', 'a device')}"
    picture = plots.picture(report.suite) if report.suite is not None else None
    drawn = [("Speed against quality; hollow: dominated", picture)] if picture else []
    texts = (f"# {title}\n\n{markdown(found)}", latex(found), page(found, title, drawn))
    for path, text in zip(targets(out), texts, strict=True):
        write_whole(path, text)
    return targets(out)


def all_tables(report: Evaluation) -> list[Table]:
    """Return every table that the evaluation has figures for."""
    found = list(tables(report.suite)) if report.suite is not None else []
    return [*found, *first_experiments(report)]


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
         "TV per token": ("total_variation", 4)},
    ),
    "distances": (
        "Distance to exact decoding",
        {"strategy": ("strategy", 0), "KID x 1000": ("kid", 1), "p": ("p_value", 2),
         "equal tokens, greedy": ("greedy_same_tokens", 2)},
    ),
}  # fmt: skip


def shown(value: Any, places: int | None, unit: str = "") -> str:
    """Return a figure as a table shows it, with its interval; a dash where it was not measured.

    ``places`` after the point; None: as many digits as it needs.
    """
    if isinstance(value, Strategy):
        return in_words(value)
    if isinstance(value, Interval):
        figure, low, high = (f"{x:.{places or 0}f}" for x in (value.value, value.low, value.high))
        return f"{figure}{unit} [{low}, {high}]"
    if isinstance(value, float):
        return (f"{value:g}" if places is None else f"{value:.{places}f}") + unit
    return DASH if value is None or str(value).startswith(NOT_MEASURED) else str(value)


def first_experiments(report: Evaluation) -> Iterator[Table]:
    """Yield the tables of likelihood, ambiguity, interchange, frontier, distances, memorisation."""
    for part, (title, columns) in PARTS.items():
        if found := getattr(report, part):
            fields = columns.values()
            rows = [[shown(getattr(row, name), places) for name, places in fields] for row in found]
            yield Table(title, list(columns), rows)
    if report.memorisation:
        m = report.memorisation
        yield Table(
            "Memorisation",
            ["images", "median distance to the nearest training image"],
            [
                [f"{len(m.samples)} samples", f"{m.samples_median:.1f}"],
                [f"{m.heldout_count} held-out images", f"{m.heldout_median:.1f}"],
            ],
        )


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
        cells = [
            row.label,
            shown(s.seconds_per_image, 3),
            shown(s.speedup, 2, "x"),
            shown(s.tokens_per_step, 2),
            shown(s.total_variation, 4),
        ]
        rows.append(
            [*cells, *(shown(row.metrics.get(c.key), _DIGITS.get(c.key, 2)) for c in measured)]
        )
    found = [Table(_title(suite), heads, rows, _notes(suite))]
    columns = [[c.title, c.network, c.preprocessing or DASH, c.note or DASH] for c in suite.columns]
    found.append(Table("How it is measured", ["figure", "network", "pictures", "note"], columns))
    if suite.published:
        found.append(_published(suite))
    return found


def _title(suite: Suite) -> str:
    name = {"coco": "MS-COCO", "imagenet": "ImageNet", "prompts": suite.prompts_source}[suite.name]
    return f"{name}, {suite.count} images per strategy, seed {suite.seed}, protocol {suite.protocol.name}"


def _notes(suite: Suite) -> list[str]:
    """Return what a reader of the table must know: intervals, bias, and what was not measured."""
    notes = [
        "In brackets: 95 % bootstrap intervals, over images for quality and over chunks of "
        f"{suite.chunk} images for speed (batch {suite.batch}). Speed is that of drawing these pictures, "
        "one strategy after another; `lantern-accel profile` measures it interleaved.",
        "TV per token: the total variation that relaxation may have moved, and what weights in fewer "
        "bits cost; 0 for exact strategies on the model's own weights.",
    ]
    fid = [r.metrics.get("fid") for r in suite.rows]
    limit = [r.metrics.get("fid_infinity") for r in suite.rows]
    gaps = [
        a.value - b.value
        for a, b in zip(fid, limit, strict=True)
        if isinstance(a, Interval) and isinstance(b, Interval)
    ]
    if gaps:
        notes.append(
            f"FID of {suite.count} images is too high by about {min(gaps):.2f} to {max(gaps):.2f} (FID "
            "less FID-infinity, which is rough below a few thousand images); the bias of the real "
            "images' number is left in both."
        )
    if suite.prompts_cut:
        notes.append(
            f"{suite.prompts_cut} prompts are longer than the model's prefix and were cut."
        )
    reference = suite.reference
    if reference.get("images"):
        left = [f"{what}: {which}" for what, which in (reference.get("left_out") or {}).items()]
        odd = [f"{count} {mode}" for mode, count in (reference.get("not_rgb") or {}).items()]
        text = f"Real images: {reference['images']}."
        text += f" Left out: {'; '.join(left)}." if left else ""
        text += f" Turned into RGB: {', '.join(odd)}." if odd else ""
        notes.append(text)
    return [*notes, *_missing(suite)]


def _missing(suite: Suite) -> list[str]:
    """Return a line for each reason for which figures were not measured."""
    reasons: dict[str, list[str]] = {}
    for row in suite.rows:
        figures: dict[str, Reading] = {
            **{column.title: row.metrics.get(column.key, "") for column in suite.columns},
            "speed-up": row.speed.speedup,
            "s per image": row.speed.seconds_per_image,
        }
        for title, figure in figures.items():
            if isinstance(figure, str) and figure.startswith(NOT_MEASURED):
                titles = reasons.setdefault(figure.removeprefix(NOT_MEASURED), [])
                if title not in titles:
                    titles.append(title)
    return [f"Not measured: {', '.join(titles)} ({reason})." for reason, titles in reasons.items()]


def _published(suite: Suite) -> Table:
    measured = {column.key: column for column in suite.columns}
    keys = [key for key in measured if any(key in row.metrics for row in suite.published)]
    heads = ["method", "model", "exact", "drafter", "speed-up", "tokens per step"]
    heads += [measured[key].title for key in keys]
    rows = [
        [
            row.method,
            row.model + (f", {row.hardware}" if row.hardware else ""),
            "yes" if row.exact else "no",
            "yes" if row.drafter else "no",
            shown(row.speedup, 2, "x"),
            shown(row.tokens_per_step, 2),
            *(shown(row.metrics.get(key), 2) for key in keys),
            "; ".join(part for part in (row.source, row.note) if part),
        ]
        for row in suite.published
    ]
    return Table(
        "Published by others",
        [*heads, "source"],
        rows,
        [
            "Other models, cards, code and protocols: their values are a yardstick for ratios, not for "
            "the table above."
        ],
    )


# --- the three forms ---------------------------------------------------------------------------


def markdown(found: Sequence[Table]) -> str:
    """Return tables as Markdown."""
    parts = []
    for one in found:
        lines = [f"## {one.title}", "", *markdown_table(one.heads, one.rows), ""]
        parts.append("\n".join([*lines, *(f"- {note}" for note in one.notes)]).rstrip())
    return "\n\n".join(parts) + "\n"


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "↓": r"$\downarrow$", "↑": r"$\uparrow$", "—": "--", "`": "'",
}  # fmt: skip


def latex(found: Sequence[Table]) -> str:
    """Return tables as LaTeX (booktabs), intervals small."""
    parts = ["% \\usepackage{booktabs}"]
    for one in found:
        lines = [r"\begin{table}", r"\centering\small", rf"\caption{{{_tex(one.title)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(one.heads) - 1)}}}", r"\toprule"]
        lines += [" & ".join(map(_tex, one.heads)) + r" \\", r"\midrule"]
        lines += [" & ".join(map(_cell, row)) + r" \\" for row in one.rows]
        lines += [r"\bottomrule", r"\end{tabular}"]
        lines += [rf"\par\footnotesize {_tex(note)}" for note in one.notes]
        parts.append("\n".join([*lines, r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _cell(text: str) -> str:
    value, bracket, rest = text.partition(" [")
    return rf"{_tex(value)} {{\scriptsize [{_tex(rest)}}}" if bracket else _tex(text)


_CSS = """body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
table{display:block;overflow-x:auto}
th,td{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left}small{color:#666;display:block}
thead th{border-bottom:2px solid #333}figure{margin:1rem 0}img{max-width:100%}"""


def page(found: Sequence[Table], title: str, pictures: Sequence[tuple[str, bytes]] = ()) -> str:
    """Return tables as one self-contained HTML page; ``pictures`` are captions with PNG bytes."""
    shown = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown(found))
    parts = [re.sub(r" (\[[^]<]+\])</td>", r"<small>\1</small></td>", shown)]
    for caption, content in pictures:
        data = base64.b64encode(content).decode()
        words = html.escape(caption)
        parts.append(
            f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
            f"<figcaption>{words}</figcaption></figure>"
        )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{_CSS}</style><h1>{html.escape(title)}</h1>{''.join(parts)}</html>\n"
    )
