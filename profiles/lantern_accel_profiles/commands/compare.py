"""``lantern-accel compare``: a report of runs, as HTML, Markdown or JSON."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say, warn
from lantern_accel.errors import RequestError, did_you_mean, show
from lantern_accel_profiles.commands.tables import show_markdown

if TYPE_CHECKING:
    from lantern_accel.device.conformance import Report as ConformanceReport
    from lantern_accel_profiles.measure.record import Run
    from lantern_accel_profiles.report.points import Terms

#: Columns that a narrow terminal keeps; a relaxed speed is never shown without its fidelity.
NARROW = [
    "strategy", "speed-up", "verdict", "fidelity", "Device", "Strategy", "Images/s",
    "Seconds per request", "Cost of 1,000 images", "Device time of 1,000 images", "Slower than #1 by",
]  # fmt: skip
#: The largest amount that is believed; larger ones are typing mistakes.
MOST = 1e9
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+) ?(?P<unit>[A-Za-z]{3}|[$€£¥])")


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
        help="Report file: .html, .md or .json. Default: print the answer and its tables.",
    ),
    buy: list[str] = typer.Option(
        [],
        metavar="[NAME=]AMOUNT",
        help="Purchase cost of a device, such as 900EUR, spread over --years. NAME is a run's name or "
        "its file's. Without it the amount is for every run. Repeatable.",
    ),
    rent: list[str] = typer.Option(
        [], metavar="[NAME=]AMOUNT", help="Rent per device-hour, power included, such as 1.2EUR."
    ),
    years: float = typer.Option(
        3.0, min=0.01, max=100, help="Years that a bought device runs without pause."
    ),
    power: str | None = typer.Option(
        None, metavar="AMOUNT", help="Cost of a kilowatt-hour, such as 0.30EUR. Needs a meter."
    ),
    overhead: float = typer.Option(
        1.0, min=1, max=10, help="Power usage effectiveness (PUE) of the site. Multiplies joules."
    ),
    latency: float | None = typer.Option(
        None,
        min=1e-6,
        max=bounds.MOST_SECONDS,
        help="Largest seconds per request. 95 % of the requests must meet it.",
    ),
    tv_budget: float = typer.Option(
        0.0,
        min=0,
        max=1,
        help="Largest TV per token of the strategies considered. 0: exact ones only.",
    ),
) -> None:
    """Compare runs: which device is fastest or cheapest, and where drafting is faster.

    Example: lantern-accel compare cpu.json profiles/measured/*.json -o report.html
    """
    from lantern_accel_profiles.measure.reading import check_comparable
    from lantern_accel_profiles.report import render
    from lantern_accel_profiles.report.advice import headline
    from lantern_accel_profiles.report.comparison import compare as put_side_by_side
    from lantern_accel_profiles.report.verdict import device_sentences

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
        say("add -o report.html for images, plots and all figures", label="next")
        return
    render.write(comparison, output)
    for section in comparison.models:
        say(headline(section, comparison.terms), style="bold")
        for device in device_sentences(section):
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
        name, named = _split_name(text)
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
                warn(f"{one} is not complete; `{read.command} --resume` continues it")
            runs.append(read)
            origins.append(one)
            called.append({read.name, path.stem, path.name})
    if not runs:
        raise RequestError(
            "there is no run to report on; measure one with `lantern-accel profile -o`"
        )
    return runs, origins, conformance, called


def _split_name(text: str) -> tuple[str, str]:
    """Split ``NAME=FILE``; a file whose own name has a ``=`` stays whole."""
    name, sign, path = text.partition("=")
    if sign and not Path(text).exists():
        return name, path
    return "", text


def read_terms(
    runs: Sequence[Run],
    called: Sequence[set[str]],
    rent: Sequence[str],
    buy: Sequence[str],
    power: str | None,
) -> Terms:
    """Return what devices and power cost, by the names of runs; raises RequestError.

    Words of ``rent`` and ``buy`` are each ``AMOUNT``, for every run without one of its own, or
    ``NAME=AMOUNT``; ``called``: the names that each run answers to.
    """
    from lantern_accel_profiles.report.points import Terms

    amounts: dict[str, dict[str, float]] = {"--rent": {}, "--buy": {}}
    units: set[str] = set()
    per_kwh = None if power is None else read_amount("--power", power, units)
    given = [("--rent", word) for word in rent] + [("--buy", word) for word in buy]
    for option, word in sorted(given, key=lambda one: "=" in one[1]):  # those of all runs first
        name, _, text = word.rpartition("=")
        mine = [run for run, names in zip(runs, called, strict=True) if not name or name in names]
        if name and len(mine) != 1:
            raise RequestError(
                f"{option} {show(word)}: {show(name)} names {len(mine)} runs"
                f"{did_you_mean(name, sorted(set().union(*called)))}; give a run a name with NAME=FILE"
            )
        amount = read_amount(option, text, units)
        amounts[option] |= {run.name: amount for run in mine}
    if both := sorted(amounts["--rent"].keys() & amounts["--buy"].keys()):
        raise RequestError(
            f"run {both[0]!r} has both --rent and --buy; give it one of them, as NAME=AMOUNT"
        )
    if len(units) > 1:
        listed = " and ".join(sorted(units))
        raise RequestError(f"amounts are in {listed}; write all of them in one currency")
    return Terms(
        rent=amounts["--rent"], buy=amounts["--buy"], power=per_kwh, currency="".join(units)
    )


def read_amount(option: str, word: str, units: set[str]) -> float:
    """Return an amount such as ``900EUR``, and add its currency; raises RequestError for no amount."""
    found = _AMOUNT.fullmatch(word.strip())
    amount = float(found["number"]) if found else math.nan
    if found is None or not 0 < amount <= MOST:
        raise RequestError(
            f"{option} {show(word)} is not an amount with its currency; write it as 0.30EUR"
        )
    units.add(found["unit"])
    return amount
