"""Makes a command line of one function: the scripts in ``tools/`` are run by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer

from lantern_accel.cli.console import say
from lantern_accel.errors import LanternError


def run_single(command: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """Run a function whose signature typer reads; return its exit code, an error as one sentence."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(args=None if argv is None else list(argv))
    except SystemExit as stop:  # how typer ends, also after a command that worked
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except LanternError as error:
        say(str(error), label="error", style="bold red", to_stderr=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
