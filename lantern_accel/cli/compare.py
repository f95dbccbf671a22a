"""``lantern-accel compare``: runs side by side, as a page, as Markdown or as JSON."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say, show_markdown, warn
from lantern_accel.errors import RequestError

if TYPE_CHECKING:
    from lantern_accel.device.conformance import Report as ConformanceReport
    from lantern_accel.measure.record import Run

#: Columns that a narrow terminal keeps; fidelity is one: no relaxed speed is shown without its price.
NARROW = [
    "strategy", "speed-up", "verdict", "fidelity", "device", "with", "images per second",
    "1,000 images cost",
]  # fmt: skip


def compare(
    files: list[str] = typer.Argument(
        ...,
        metavar="FILE...",
        help="Runs of `lantern-accel profile` or `bench`; NAME=FILE renames one. Reports of `conform` "
        "may be given too.",
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="The report: .html, .md or .json by its name. Default: print the answer and its tables.",
    ),
    price: list[str] = typer.Option(
        [],
        metavar="NAME=AMOUNT",
        help="What an hour of a run's device costs, such as gpu=2.10EUR: the report says what 1,000 "
        "images cost. NAME is a run's name or its file's. Repeat for several.",
    ),
    latency: float | None = typer.Option(
        None,
        min=1e-6,
        max=bounds.MOST_SECONDS,
        help="The most seconds that a request may take; images that come later do not count.",
    ),
    tv_budget: float = typer.Option(
        0.0,
        min=0,
        max=1,
        help="The most of a token's probability that an offered strategy may move; 0: exact ones only.",
    ),
) -> None:
    """Compare runs: whether drafting pays, which device to buy, plots, and every figure.

    Example: lantern-accel compare cpu.json profiles/measured/*.json -o report.html
    """
    from lantern_accel.measure.reading import check_comparable
    from lantern_accel.report import render
    from lantern_accel.report.comparison import compare as put_side_by_side
    from lantern_accel.report.offers import Terms, read_prices
    from lantern_accel.report.verdict import QUESTION, first_screen

    if output is not None:
        render.check_kind(output)
    runs, origins, conformance, called = _read(files, output)
    check_comparable(runs, origins)
    prices, currency = read_prices(price, runs, called)
    terms = Terms(tv_budget=tv_budget, latency_s=latency, prices=prices, currency=currency)
    comparison = put_side_by_side(runs, conformance, terms=terms)
    if output is None:
        show_markdown(render.answer(comparison), NARROW)
        say("add -o report.html for pictures, plots and every figure", label="next")
        return
    render.write(comparison, output)
    for section in comparison.models:
        screen = first_screen(comparison, section)
        for sentence in screen.opening:
            say(sentence)
        for device in screen.devices:
            about = f"{device.run}:" if len(screen.devices) > 1 else QUESTION
            say(f"{about} {device.short}", style="bold")
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    say(f"{output} ({count})", label="wrote", style="bold green")


def _read(
    files: list[str], output: Path | None
) -> tuple[list[Run], list[str], list[ConformanceReport], list[set[str]]]:
    """Read every file; a pattern that matches nothing is reported and left out.

    Returns runs, their files, conformance reports, and the names that each run answers to.
    Raises RequestError where ``output`` is one of them: raw samples are in no report.
    """
    from lantern_accel.device.conformance import Report
    from lantern_accel.measure.reading import read_file
    from lantern_accel.store import check_name

    runs, origins, conformance, called = [], [], [], []
    for text in files:
        name, named = _renamed(text)
        check_name(name)
        pattern = glob.has_magic(named) and not Path(named).exists()
        found = sorted(glob.glob(named)) if pattern else [named]
        if not found:
            warn(f"nothing matches {named}")
        for one in found:
            path = Path(one)
            if output is not None and output.exists() and path.exists() and output.samefile(path):
                raise RequestError(
                    f"{output} is one of the files to compare, and the report would replace it; name "
                    "another with -o"
                )
            read = read_file(path)
            if isinstance(read, Report):
                conformance.append(read)
                continue
            if name:
                read = read.model_copy(update={"name": name})
            if read.state != "complete":
                warn(f"{one} is not complete; `{read.command} --resume` goes on")
            runs.append(read)
            origins.append(one)
            called.append({read.name, path.stem, path.name})
    if not runs:
        raise RequestError(
            "there is no run to report on; measure one with `lantern-accel profile -o`"
        )
    return runs, origins, conformance, called


def _renamed(text: str) -> tuple[str, str]:
    """Split ``NAME=FILE``; a file whose own name has a ``=`` stays whole."""
    name, sign, path = text.partition("=")
    if sign and not Path(text).exists():
        return name, path
    return "", text
