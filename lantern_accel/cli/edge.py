"""The command's edge: what an error, an interrupt or a full disk looks like to a user."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import cast

import typer
from pydantic import ValidationError

from lantern_accel.cli.console import say
from lantern_accel.errors import Ended, FetchError, LanternError, what_is_wrong
from lantern_accel.files import disk_is_full, persistent_dir
from lantern_accel.strategy.choose import CHANGES

#: Some of :data:`lantern_accel.errors.EXIT_CODES`.
WRONG, FAULT, RESOURCES, INTERRUPTED, ENDED = 2, 3, 5, 130, 143


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise :class:`Ended` in the block, where signals can be handled at all."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_tracebacks(wanted: bool) -> None:
    """Say whether errors are shown with their tracebacks."""
    global _debug
    _debug = wanted


_debug = False


def run_guarded(command: Callable[[], object]) -> int:
    """Run a command; return its exit code, one of :data:`lantern_accel.errors.EXIT_CODES`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the command; its number is free
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, open to the end
    if not faulthandler.is_enabled():  # a library that crashes is named by its file
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable()
    try:
        with ending_as_interrupt():
            try:
                ended = command()  # typer returns the code of an exit that a command raised
                code = ended if isinstance(ended, int) else 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            sys.stdout.flush()
            return code
    except Ended:
        return ENDED
    except (KeyboardInterrupt, typer.Abort):  # older typer raises the second for the first
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has ended
        _drop_stdout()
        return 1
    except Exception as error:
        if not isinstance(error, LanternError):
            _drop_stdout()
        if _debug:
            traceback.print_exc()
        code, text = _explain(error)
        # Commands to copy have a line of their own.
        lines = text.splitlines() if isinstance(error, FetchError) else [text]
        for number, line in enumerate(lines):
            # A number of thousands of digits that was refused is known by its first ones.
            line = re.sub(r"\S{400,}", lambda word: f"{word[0][:200]}...", line)
            style = "default" if number else "bold red"
            with contextlib.suppress(OSError):  # nobody reads standard error either
                say(line, label="" if number else "error", style=style, to_stderr=True)
        return code


def _explain(error: Exception) -> tuple[int, str]:
    """Return an error's exit code, and what is said to the user; the traceback of a fault is kept."""
    if isinstance(error, LanternError):
        return error.exit_code, str(error)
    if isinstance(error, _USAGE):
        return WRONG, _explain_misuse(cast(typer.BadParameter, error))
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        full = disk_is_full(error)
        way = "free some space or choose" if full else "choose"
        what = f"{error.strerror or error}{where}; {way} another file or folder"
        return (RESOURCES if full else WRONG), what
    text = " ".join(str(error).split())[:200]
    # torch has words of its own for the host's memory.
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        what = text or "MemoryError"
        return RESOURCES, f"this machine's memory ran out ({what}); ask for less at once (--batch)"
    kept = _keep(traceback.format_exc())
    more = f"; its traceback is in {kept}, please report it" if kept else ""
    return FAULT, f"this should not have happened: {type(error).__name__}: {text}{more}"


def _explain_misuse(error: typer.BadParameter) -> str:
    """Return what is wrong with a command's words, in this project's form, from what typer raised."""
    path = "lantern-accel" if error.ctx is None else error.ctx.command_path
    way = f"; `{path} --help` lists what it takes"
    param, wrong = getattr(error, "param", None), error.__cause__
    if isinstance(wrong, ValidationError) and param is not None:
        return f"{param.opts[0]}{what_is_wrong(wrong.errors()[0])}"
    text = error.format_message().rstrip(".").replace(". Did", "; did")
    text = "Missing command" if text.startswith("Usage") else text
    setting = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    if setting in CHANGES:
        way = f"; a strategy takes it, as --strategy NAME:{setting}=VALUE{way}"
    return f"{text[0].lower()}{text[1:]}{way}"


#: All that typer raises for a command's words; older releases have it from click.
_USAGE = typer.BadParameter.__mro__[1]


def _drop_stdout() -> None:
    """Forget what standard output could not take, so that Python does not complain when it ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _keep(text: str) -> Path | None:
    """Write a traceback to the cache, else to the system's temporary folder; None if neither can."""
    with contextlib.suppress(OSError):
        folder = persistent_dir("errors") or Path(tempfile.gettempdir())
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.write_text(f"{' '.join(sys.argv)}\n{text}", encoding="utf-8")
        return path
    return None
