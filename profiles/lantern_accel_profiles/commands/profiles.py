"""``lantern-accel profiles`` lists measured runs, and files new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel.cli.console import print_json, say
from lantern_accel.cli.options import AsJson
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json

if TYPE_CHECKING:
    from lantern_accel_profiles.measure.record import Run

#: Stopwatch over host clock on work of a known end, where both see the same.
CLOCKS = (0.9, 1.1)

commands = typer.Typer(
    help="List measured runs, or file one of your own.",
    no_args_is_help=False,
    rich_markup_mode=None,
)


@commands.callback(invoke_without_command=True)
def profiles(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List measured runs, or file one of your own."""
    if ctx.invoked_subcommand is not None:
        return
    from lantern_accel.device.datasheets import profiles_dir
    from lantern_accel_profiles.measure.reading import read_run

    found = []
    for path in sorted((profiles_dir() / "measured").glob("*.json")):
        run = read_run(path)
        found.append(
            {
                "file": str(path),
                "device": run.environment.device.name,
                "model": run.settings.model,
                "dtype": run.environment.dtype,
                "measured": run.sessions[0].started if run.sessions else None,
                "cells": len(run.cells),
            }
        )
    if as_json:
        return print_json(found)
    for one in found:
        text = f"{one['model']} in {one['dtype']}, {one['cells']} cells, {one['measured']}"
        say(text, label=str(one["device"]), style="bold")
    say("lantern-accel hardware lists the limits of devices", label="limits", style="dim")


@commands.command("add")
def add(
    run: Path = typer.Argument(..., metavar="RUN.json", help="A run of `lantern-accel profile`."),
    folder: Path = typer.Option(
        None, "--out", help="Folder of filed runs. Default: profiles/measured of this checkout."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a run of the same name."),
) -> None:
    """Check a run for completeness and agreeing clocks, and file it.

    Exit code 2 where it cannot be filed. docs/compare-hardware.md has the steps before it.
    """
    from lantern_accel.device.datasheets import profiles_dir
    from lantern_accel_profiles.measure.reading import read_run

    read = read_run(run)
    if found := [*faults(read)]:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RequestError(f"{run} cannot be filed: {found[0]}{more}")
    path = (folder or profiles_dir() / "measured") / file_name(read)
    if path.exists() and not overwrite:
        raise RequestError(f"{path} is there already; add --overwrite to replace it")
    write_json(path, read.model_dump(mode="json"))
    say(str(path), label="filed", style="bold green")
    say(f"git add {path}, and open a pull request", label="next", style="bold")


def faults(run: Run) -> Iterator[str]:
    """Yield why a run cannot be filed."""
    from lantern_accel_profiles.report.rows import clock_jumps, describe_disturbance

    if run.state != "complete":
        yield f"it is {run.state}; `{run.command} --resume` completes it"
    if not run.cells:
        yield "it holds no measurement of requests"
    for cell in run.cells:
        if len(cell.samples) < 2:
            yield f"{cell.name}: it has {len(cell.samples)} samples, at least two are needed"
        if clock_jumps(cell.samples):
            yield f"{cell.name}: {describe_disturbance(cell)}"
    if isinstance(run.clock, str):
        yield f"its stopwatch was not checked ({run.clock})"
    elif not CLOCKS[0] <= run.clock.ratio <= CLOCKS[1]:
        yield (
            f"its stopwatch read {run.clock.ratio:.2f} of the host's clock on work of a known end"
        )


def file_name(run: Run) -> str:
    """Return the name that a run is filed under: device, model and dtype."""
    device = run.environment.device
    words = (device.backend, device.name, run.settings.model, run.environment.dtype)
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-.")[:120] + ".json"
