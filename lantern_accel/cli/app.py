"""The commands by name; each module registers its own and imports what it needs when it runs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import typer

from lantern_accel.cli.compare import compare
from lantern_accel.cli.conform import conform, port
from lantern_accel.cli.devices import devices, hardware
from lantern_accel.cli.evaluate import evaluate
from lantern_accel.cli.generate import generate
from lantern_accel.cli.help import WHICH, exit_codes, tidy
from lantern_accel.cli.models import commands as models
from lantern_accel.cli.profile import bench, profile
from lantern_accel.cli.profiles import commands as profiles
from lantern_accel.cli.serve import serve
from lantern_accel.cli.stepcost import stepcost
from lantern_accel.cli.train import train
from lantern_accel.cli.tune import tune

app = typer.Typer(
    name="lantern-accel",
    help="Generate images faster by speculative decoding, with the same output by default.",
    epilog=f"{WHICH}\n\n{exit_codes()}",
    no_args_is_help=True,
    # Plain text: the same on a terminal, in a pipe and in the documentation.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lantern-accel {importlib.metadata.version('lantern-accel')}")
        raise typer.Exit


_debug = False


def debugging() -> bool:
    """Return whether the command was asked to show tracebacks."""
    return _debug


def _set_debug(wanted: bool) -> None:
    global _debug
    _debug = wanted


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
    debug: bool = typer.Option(
        False, "--debug", callback=_set_debug, help="Show the traceback of an error."
    ),
) -> None:
    pass


#: In the order in which ``--help`` lists them; groups of commands come last there.
COMMANDS: dict[str, Callable[..., Any]] = {
    "generate": generate,
    "devices": devices,
    "bench": bench,
    "tune": tune,
    "stepcost": stepcost,
    "profile": profile,
    "compare": compare,
    "hardware": hardware,
    "conform": conform,
    "port": port,
    "evaluate": evaluate,
    "serve": serve,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
for name, group in {"models": models, "profiles": profiles, "train": train}.items():
    app.add_typer(group, name=name)
tidy(app)
