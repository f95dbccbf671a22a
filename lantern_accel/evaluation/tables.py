"""An evaluation as tables in three files: the papers' tables first, then their first experiments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from lantern_accel.errors import DataError
from lantern_accel.evaluation.schema import Evaluation
from lantern_accel.evaluation.suite import figure
from lantern_accel.evaluation.suite.table import DASH, Table, latex, markdown, page, reading, tables
from lantern_accel.files import check_target, write_whole
from lantern_accel.strategy.values import Strategy

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
    picture = figure.picture(report.suite) if report.suite is not None else None
    drawn = [("Speed against quality; hollow: dominated", picture)] if picture else []
    texts = (f"# {title}\n\n{markdown(found)}", latex(found), page(found, title, drawn))
    for path, text in zip(targets(out), texts, strict=True):
        write_whole(path, partial(_put, text.encode()))
    return targets(out)


def _put(content: bytes, stream: IO[bytes]) -> None:
    stream.write(content)


def all_tables(report: Evaluation) -> list[Table]:
    """Return every table that the evaluation has figures for."""
    found = list(tables(report.suite)) if report.suite is not None else []
    return [*found, *first_experiments(report)]


def first_experiments(report: Evaluation) -> Iterator[Table]:
    """Yield the tables of likelihood, ambiguity, interchange, frontier, distances, memorisation."""
    if report.likelihood:
        rows = [[r.images, str(r.count), f"{r.nll:.3f}"] for r in report.likelihood]
        yield Table("Likelihood", ["images", "count", "nats per token"], rows)
    if report.ambiguity:
        heads = ["of", "guidance", "top-1", "top-10 mass", "entropy, nats"]
        yield Table(
            "Token selection ambiguity",
            heads,
            [
                [
                    r.of,
                    DASH if r.cfg is None else f"{r.cfg:g}",
                    f"{r.top1_mean:.3f}",
                    f"{r.top10_mass:.3f}",
                    f"{r.entropy:.2f}",
                ]
                for r in report.ambiguity
            ],
        )
    if report.interchange:
        yield Table(
            "Interchangeable codes",
            ["every code replaced by", "PSNR, dB", "feature distance"],
            [
                [
                    r.replaced_by,
                    f"{r.psnr:.1f}",
                    DASH if r.feature_distance is None else f"{r.feature_distance:.4f}",
                ]
                for r in report.interchange
            ],
        )
    if report.frontier:
        yield Table(
            "Tokens per step and the true total variation",
            ["strategy", "tokens per step", "TV per token"],
            [
                [
                    in_words(r.strategy),
                    reading(r.step_compression, 2),
                    reading(r.total_variation, 4),
                ]
                for r in report.frontier
            ],
        )
    if report.distances:
        yield Table(
            "Distance to exact decoding",
            ["strategy", "KID x 1000", "p", "equal tokens, greedy"],
            [
                [
                    in_words(r.strategy),
                    reading(r.kid, 1),
                    DASH if r.p_value is None else f"{r.p_value:.2f}",
                    reading(r.greedy_same_tokens, 2),
                ]
                for r in report.distances
            ],
        )
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
