"""The commands by name; each module registers its own and imports what it needs when it runs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import typer

from lantern_accel import extensions
from lantern_accel.cli.conform import conform, port
from lantern_accel.cli.devices import devices, hardware
from lantern_accel.cli.edge import show_tracebacks
from lantern_accel.cli.generate import generate
from lantern_accel.cli.help import WHICH, exit_codes, tidy
from lantern_accel.cli.models import commands as models
from lantern_accel.cli.serve import serve
from lantern_accel.cli.train import train
from lantern_accel.extensions import load_extensions

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
        False, "--debug", callback=show_tracebacks, help="Show the traceback of an error."
    ),
) -> None:
    pass


#: In the order in which ``--help`` lists them, before those of other packages; groups come last there.
COMMANDS: dict[str, Callable[..., object] | typer.Typer] = {
    "generate": generate,
    "devices": devices,
    "hardware": hardware,
    "conform": conform,
    "port": port,
    "serve": serve,
    "models": models,
    "train": train,
}
for name, command in (*COMMANDS.items(), *load_extensions(extensions.COMMANDS)):
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)
tidy(app)
