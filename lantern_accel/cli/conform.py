"""``lantern-accel conform``: is a backend correct, static and replayable?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, read_options

if TYPE_CHECKING:
    from lantern_accel.device.conformance import Outcome

STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("conform")(conform)


def conform(
    device: str = typer.Argument(..., help="The backend to check."),
    only: list[str] = typer.Option([], help="A group (static) or a check; repeat for several."),
    software: bool = typer.Option(
        False, "--software", help="Run the backend on its device in software, where it has one."
    ),
    option: list[str] = OPTION,
    json_path: Path = typer.Option(None, "--json", help="Write the report as JSON."),
    junit: Path = typer.Option(None, help="Write the report as JUnit XML."),
) -> None:
    """Run the conformance checks; exit code 1 where one fails."""
    from lantern_accel.device.plugins import choose_device

    options = read_options(option)
    if software:
        options["software"] = True
    # The device comes before torch, which the kit imports: some read the environment then.
    chosen = choose_device(device, options)
    from lantern_accel.testing import kit

    report = kit.conform(chosen, only=only, json=json_path, junit=junit, on_outcome=_tell)
    say(report.summary())
    if not report.passed:
        raise typer.Exit(1)


def _tell(outcome: Outcome) -> None:
    figure = ""
    if outcome.error is not None:
        figure = f" (error {outcome.error:.2g}, tolerance {outcome.tolerance:.2g})"
    say(
        f"{outcome.name}: {outcome.detail}{figure}",
        label=outcome.state,
        style=STYLES[outcome.state],
    )
