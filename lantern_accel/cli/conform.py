"""``lantern-accel port`` starts a backend for another device; ``conform`` checks one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel.bounds import MOST_SECONDS
from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, read_options
from lantern_accel.files import check_targets

if TYPE_CHECKING:
    from lantern_accel.device.conformance import Outcome

GROUPS = "static, kv, attention, accept, draw, decode, replay, device, or the backend's own"
STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def conform(
    device: str = typer.Argument(..., metavar="DEVICE", help="The backend to check."),
    only: list[str] = typer.Option([], help=f"A group ({GROUPS}) or a check; repeat for several."),
    software: bool = typer.Option(
        False, "--software", help="Run the backend on its device in software, where it has one."
    ),
    option: list[str] = OPTION,
    output: Path = typer.Option(None, "--output", "-o", help="Write the report here, as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    limit: float = typer.Option(
        600.0, min=1, max=MOST_SECONDS, help="Seconds that a check may take."
    ),
    junit: Path = typer.Option(None, help="Write the report as JUnit XML."),
    certificate: Path = typer.Option(
        None, help="Write a certificate: Markdown, with the same as JSON next to it."
    ),
) -> None:
    """Check that a backend is correct, static and replayable; exit code 1 if a check fails."""
    from lantern_accel.device.plugins import choose_device

    check_targets(output, junit, certificate=certificate)
    options = read_options(option)
    if software:
        options["software"] = True
    # Choose the device before torch is imported: some vendors read the environment then.
    chosen = choose_device(device, options)
    from lantern_accel.families.registry import broken_families
    from lantern_accel.testing import kit

    for name, reason in broken_families().items():
        say(f"{reason}; its models are not checked", label=f"family {name}", to_stderr=True)
    report = kit.conform(
        chosen,
        only=only,
        json=output,
        junit=junit,
        certificate=certificate,
        on_outcome=None if as_json else _tell,
        limit=limit,
        on_wait=lambda check, doing, seconds: say(
            f"{doing or 'running'}, {seconds:.0f} s", label=check, style="dim", to_stderr=True
        ),
    )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        say(report.summary())
    if certificate is not None:
        say(str(certificate), label="certificate", style="bold", to_stderr=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _tell(outcome: Outcome) -> None:
    text = f"{outcome.name}: {outcome.detail}"
    if outcome.error is not None:
        text += f" (error {outcome.error:.2g}, tolerance {outcome.tolerance:.2g})"
    say(text, label=outcome.state, style=STYLES[outcome.state])


def port(
    name: str = typer.Argument(
        ..., metavar="NAME", help="The device's name: lower-case letters, digits and '_'."
    ),
    out: Path = typer.Option(Path(), "--out", help="The folder to put the package into."),
) -> None:
    """Write the package lantern_accel_NAME, a backend that runs and passes its checks at once.

    docs/porting.md is the tutorial that goes on from there.
    """
    from lantern_accel.porting.scaffold import scaffold

    folder = scaffold(name, out)
    say(str(folder), label="wrote", style="bold green")
    where = folder if folder.is_absolute() else f"./{folder}"
    say(f"pip install -e '{where}[test]'", label="next", style="bold")
    say(f"lantern-accel conform {name} --only static", label="then", style="bold")
    say(f"{folder / 'CHECKLIST.md'} says what pays most", label="after that", style="bold")
