"""The commands by name; each module registers its own and imports what it needs when it runs."""

from __future__ import annotations

import importlib.metadata

import typer

from lantern_accel.cli import (
    bench,
    compare,
    conform,
    devices,
    evaluate,
    generate,
    hardware,
    models,
    port,
    profile,
    profiles,
    serve,
    stepcost,
    train,
    tune,
    warm_up,
)
from lantern_accel.cli.help import WHICH, exit_codes, tidy

app = typer.Typer(
    name="lantern-accel",
    help="Generate images with LANTERN speculative decoding, on any accelerator.",
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


generate.register(app)
models.register(app)
devices.register(app)
bench.register(app)
tune.register(app)
stepcost.register(app)
profile.register(app)
compare.register(app)
hardware.register(app)
profiles.register(app)
conform.register(app)
port.register(app)
train.register(app)
evaluate.register(app)
warm_up.register(app)
serve.register(app)
tidy(app)
