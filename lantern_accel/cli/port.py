"""``lantern-accel port``: start a backend for another device."""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel.cli.console import say


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("port")(port)


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
