"""The command ``lantern-accel``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lantern_accel.cli.console import warn
from lantern_accel.errors import LanternWarning

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of :data:`lantern_accel.errors.EXIT_CODES`."""
    from lantern_accel.cli.app import app

    return run(app, argv, "lantern-accel")


def run(app: Callable[..., object], argv: Sequence[str] | None, name: str) -> int:
    """Run an application's command with this project's warnings and errors; return its exit code."""
    from lantern_accel.cli.edge import run_guarded

    with warnings.catch_warnings():
        warnings.simplefilter("always", LanternWarning)
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            # Where in our source a warning was raised helps no user.
            if issubclass(category, LanternWarning):
                warn(str(message))
            else:
                show_others(message, category, *where, **more)

        warnings.showwarning = show
        words = None if argv is None else list(argv)
        return run_guarded(lambda: app(args=words, prog_name=name, standalone_mode=False))


def run_single(command: Callable[..., object], argv: Sequence[str] | None = None) -> int:
    """Run a function whose signature typer reads, such as a script's; return its exit code."""
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    return run(app, argv, os.path.basename(sys.argv[0]))
