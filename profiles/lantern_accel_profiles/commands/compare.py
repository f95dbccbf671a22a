"""``lantern-accel compare``: runs side by side, as a page, as Markdown or as JSON."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say, warn
from lantern_accel.errors import RequestError
from lantern_accel_profiles.commands.tables import show_markdown

if TYPE_CHECKING:
    from lantern_accel.device.conformance import Report as ConformanceReport
    from lantern_accel_profiles.measure.record import Run

#: Columns that a narrow terminal keeps; a relaxed speed is never shown without its fidelity.
NARROW = [
    "strategy", "speed-up", "verdict", "fidelity", "Device", "Decodes with", "Images/s",
    "Seconds per request", "1,000 images cost", "1,000 images take a device", "Slower than the first by",
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
    buy: list[str] = typer.Option(
        [],
        metavar="[NAME=]AMOUNT",
        help="What a device costs to buy, such as 900EUR, spread over --years. NAME is a run's name or "
        "its file's; without it the amount is for every run. Repeat for several.",
    ),
    rent: list[str] = typer.Option(
        [], metavar="[NAME=]AMOUNT", help="What an hour of a device costs, power in it: 1.2EUR."
    ),
    years: float = typer.Option(
        3.0, min=0.01, max=100, help="For how long a bought device runs, without pause."
    ),
    power: str | None = typer.Option(
        None, metavar="AMOUNT", help="What a kilowatt-hour costs: 0.30EUR. Needs runs with a meter."
    ),
    overhead: float = typer.Option(
        1.0, min=1, max=10, help="The site's power over its devices' (PUE); multiplies joules."
    ),
    latency: float | None = typer.Option(
        None,
        min=1e-6,
        max=bounds.MOST_SECONDS,
        help="The most seconds that an image may take: 95 of 100 requests have to keep it.",
    ),
    tv_budget: float = typer.Option(
        0.0,
        min=0,
        max=1,
        help="Largest TV per token of the strategies considered; 0: exact ones only.",
    ),
) -> None:
    """Compare runs: which device to choose, whether drafting is faster, plots, and every figure.

    Example: lantern-accel compare cpu.json profiles/measured/*.json -o report.html
    """
    from lantern_accel_profiles.commands.amounts import read_terms
    from lantern_accel_profiles.measure.reading import check_comparable
    from lantern_accel_profiles.report import render
    from lantern_accel_profiles.report.advice import headline
    from lantern_accel_profiles.report.comparison import compare as put_side_by_side
    from lantern_accel_profiles.report.verdict import first_screen

    if output is not None:
        render.check_kind(output)
    render.check_packages(output)
    runs, origins, conformance, called = _read(files, output)
    check_comparable(runs, origins)
    terms = read_terms(runs, called, rent, buy, power).model_copy(
        update={"tv_budget": tv_budget, "latency_s": latency, "years": years, "overhead": overhead}
    )
    comparison = put_side_by_side(runs, conformance, terms=terms)
    if output is None:
        show_markdown(render.answer(comparison), NARROW)
        say("add -o report.html for images, plots and every figure", label="next")
        return
    render.write(comparison, output)
    for section in comparison.models:
        say(headline(section, comparison.terms), style="bold")
        for device in first_screen(comparison, section).devices:
            say(f"{device.run}: {device.short}")
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
    from lantern_accel_profiles.measure.reading import read_file
    from lantern_accel_profiles.store import check_name

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
