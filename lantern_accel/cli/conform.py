"""``lantern-accel conform``: is a backend correct, static and replayable?"""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel.cli.console import say

STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("conform")(conform)


def conform(
    device: str = typer.Argument(..., help="The backend to check."),
    only: list[str] = typer.Option([], help="A group (static) or a check; repeat for several."),
    json_path: Path = typer.Option(None, "--json", help="Write the report as JSON."),
    junit: Path = typer.Option(None, help="Write the report as JUnit XML."),
) -> None:
    """Run the conformance checks; exit code 1 where one fails."""
    from lantern_accel.testing import kit

    def tell(outcome: kit.Outcome) -> None:
        figure = ""
        if outcome.error is not None:
            figure = f" (error {outcome.error:.2g}, tolerance {outcome.tolerance:.2g})"
        say(
            f"{outcome.name}: {outcome.detail}{figure}",
            label=outcome.state,
            style=STYLES[outcome.state],
        )

    report = kit.conform(device, only=only, json=json_path, junit=junit, on_outcome=tell)
    say(report.table().splitlines()[-1])
    if not report.passed:
        raise typer.Exit(1)
