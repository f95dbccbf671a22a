"""``lantern-accel profiles`` lists measured runs, and files new ones."""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel.cli.console import print_json, say, warn
from lantern_accel.cli.options import AsJson
from lantern_accel.errors import RequestError

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
    """Check a run for completeness, agreeing clocks and plausible rates, and file it.

    Exit code 2 where it cannot be filed. docs/compare-hardware.md has the steps before it.
    """
    from lantern_accel.device.datasheets import all_profiles, profiles_dir
    from lantern_accel_profiles.measure.reading import read_run
    from lantern_accel_profiles.report.filing import examine, file_run

    read = read_run(run)
    found = examine(read, all_profiles())
    for note in found.notes:
        warn(note, "note")
    if found.faults:
        more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
        raise RequestError(f"{run} cannot be filed: {found.faults[0]}{more}")
    path = file_run(read, folder or profiles_dir() / "measured", overwrite=overwrite)
    say(str(path), label="filed", style="bold green")
    say(f"git add {path}, and open a pull request", label="next", style="bold")
