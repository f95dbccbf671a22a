"""``lantern-accel port`` starts a backend for another device; ``conform`` checks one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lantern_accel.bounds import MOST_SECONDS, MOST_THREADS
from lantern_accel.cli import separate
from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, read_options
from lantern_accel.errors import RequestError
from lantern_accel.files import check_targets

if TYPE_CHECKING:
    from lantern_accel.device.conformance import Outcome

#: The kit's groups, in order.
GROUPS = ["static", "kv", "operation", "attention", "accept", "draw", "decode", "replay", "device"]
ONLY = f"A check, or a group ({', '.join(GROUPS)}; own: the backend's own). Repeatable."
STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def conform(
    device: str | None = typer.Argument(None, metavar="DEVICE", help="The backend to check."),
    only: list[str] = typer.Option([], help=ONLY),
    software: bool = typer.Option(
        False, "--software", help="Run the backend on its software device, if it has one."
    ),
    option: list[str] = OPTION,
    output: Path = typer.Option(
        None, "--output", "-o", help="JSON report, written after every check."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    limit: float = typer.Option(
        600.0, min=1, max=MOST_SECONDS, help="Seconds per check, at most; not with --in-process."
    ),
    certificate: Path = typer.Option(
        None, help="Write a certificate as Markdown, and as JSON next to it."
    ),
    jobs: int = typer.Option(
        1, min=1, max=MOST_THREADS, help="Groups that run at once, each in its own process."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Run only the checks that the report of --output lacks."
    ),
    in_process: bool = typer.Option(
        False, "--in-process", help="Run all checks in this process, for a debugger."
    ),
    diff: tuple[Path, Path] | None = typer.Option(
        None,
        metavar="OLD NEW",
        help="Compare two reports. Exit code 1 if a check broke or is missing in NEW.",
    ),
) -> None:
    """Check that a backend is correct, static and replayable. Exit code 1 if a check fails.

    Each group of checks runs in its own process, so a crash or hang ends only that group.
    """
    if diff is not None:
        return _differ(diff, as_json)
    if device is None:
        raise RequestError("name the backend to check; `lantern-accel devices` lists them")
    if in_process and (resume or jobs > 1):
        raise RequestError("--resume and --jobs need processes; leave --in-process out")
    if resume and output is None:
        raise RequestError("--resume continues the report of --output; name it with -o")
    from lantern_accel.device.plugins import choose_device

    check_targets(output, certificate=certificate)
    options = read_options(option)
    if software:
        options["software"] = True
    # Choose the device before torch is imported: some vendors read the environment then.
    chosen = choose_device(device, options)
    from lantern_accel.families.registry import broken_families
    from lantern_accel.testing import kit
    from lantern_accel.testing.certificate import command_line

    for name, reason in broken_families().items():
        say(f"{reason}; its models are not checked", label=f"family {name}", to_stderr=True)
    tell: dict[str, Any] = {} if as_json else {"on_outcome": _print_outcome}
    tell["on_wait"] = lambda check, doing, seconds: say(
        f"{doing or 'running'}, {seconds:.0f} s", label=check, style="dim", to_stderr=True
    )
    if in_process:
        report = kit.conform(chosen, only=only, json=output, certificate=certificate, **tell)
    else:
        keep = partial(kit.write_report, json=output)
        places = chosen.processes(jobs)
        if (most := len(places)) < jobs:
            text = f"{jobs} were requested; at most {most} processes can use {device} at a time"
            say(text, label=f"--jobs={most}", to_stderr=True)
        run = separate.KitRun(
            device=device, options=options, places=places, limit=limit, on_report=keep, **tell
        )
        report = run.conform(
            only, resume=output if resume else None, certificate=certificate, command=command_line()
        )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        say(report.summary())
    if certificate is not None:
        say(str(certificate), label="certificate", style="bold", to_stderr=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _differ(reports: tuple[Path, Path], as_json: bool) -> None:
    from lantern_accel.device.conformance import Report, difference
    from lantern_accel.store import read_json, validate_file

    command = "lantern-accel conform DEVICE"
    old, new = (validate_file(Report, path, read_json(path, command)) for path in reports)
    found = difference(old, new)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        for line in found.lines():
            say(line)
    if found.broke or found.lost:
        raise typer.Exit(1)


def _print_outcome(outcome: Outcome) -> None:
    text = f"{outcome.name}: {outcome.detail}"
    if outcome.error is not None:
        text += f" (error {outcome.error:.2g}, tolerance {outcome.tolerance:.2g})"
    say(text, label=outcome.state, style=STYLES[outcome.state])


def port(
    name: str = typer.Argument(
        ..., metavar="NAME", help="Name of the device: lower-case letters, digits and '_'."
    ),
    out: Path = typer.Option(Path(), "--out", help="Folder that gets the package."),
) -> None:
    """Write the package lantern_accel_NAME: a new backend that runs and passes its checks.

    docs/porting.md is the tutorial for the next steps.
    """
    from lantern_accel.porting.scaffold import scaffold

    folder = scaffold(name, out)
    say(str(folder), label="wrote", style="bold green")
    where = folder if folder.is_absolute() else f"./{folder}"
    say(f"pip install -e '{where}[test]'", label="next", style="bold")
    say(f"lantern-accel conform {name} --only static", label="then", style="bold")
    say(f"{folder / 'CHECKLIST.md'} says what helps most", label="after that", style="bold")
