"""What commands print: lines, JSON, tables and bars; laid out on a terminal, plain in a pipe."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from lantern_accel.records import markdown_table

Advance = Callable[[int, int], None]


def say(text: str, *, label: str = "", style: str = "", to_stderr: bool = False) -> None:
    """Print ``label: text`` as one line, never wrapped or cut, the label in ``style``."""
    # Imported here: --help needs none of it.
    from rich.console import Console
    from rich.text import Text

    line = Text(f"{label}: " if label else "", style=style)
    line.append(" ".join(text.splitlines()), style="default" if label else style)
    Console(stderr=to_stderr, highlight=False).print(line, soft_wrap=True)


def note(text: str) -> None:
    """Print a line on standard error that says how the work goes on."""
    say(text, to_stderr=True, style="dim")


def warn(text: str, label: str = "warning") -> None:
    """Print a line on standard error that a user should not miss."""
    say(text, label=label, style="bold yellow", to_stderr=True)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


class _Notes(logging.Handler):
    """Prints what is logged as a line of its own, above a bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def print_log(quiet: bool) -> Iterator[None]:
    """Print what the package logs of its work on standard error, unless ``quiet``."""
    log, handler = logging.getLogger("lantern_accel"), _Notes()
    before = log.level
    if not quiet:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what plug-ins, their libraries and processes print in a block to standard error."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


@contextmanager
def bar(
    title: str, quiet: bool, *, unit: str = "", bytes_: bool = False
) -> Iterator[Advance | None]:
    """Show a live bar where standard error is a terminal; gives a function of done and total."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    text, shape, _, left = progress.Progress.get_default_columns()  # without the share in percent
    count = progress.DownloadColumn() if bytes_ else progress.MofNCompleteColumn()
    columns = text, shape, count, progress.TextColumn(unit), left
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(title, total=None)
        yield lambda done, total: live.update(task, completed=done, total=total)


def show_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], narrow: Sequence[str] = ()
) -> None:
    """Print a table; ``narrow``: the columns that are left where a terminal is too narrow for all."""
    if not sys.stdout.isatty():
        return print("\n".join(markdown_table(head, rows)))
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    needs = sum(max(len(row[at]) for row in [head, *rows]) + 3 for at in range(len(head))) + 1
    cut = bool(narrow) and needs > console.width
    shown = [at for at, name in enumerate(head) if not cut or name in narrow]
    table = Table()
    for at in shown:
        cells = [row[at] for row in rows if row[at]]
        numeric = bool(cells) and all(cell[:1].isdigit() for cell in cells)
        table.add_column(head[at], justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    console.print(table)
    if len(shown) < len(head):
        left_out = ", ".join(name for name in head if name not in narrow)
        console.print(f"in a wider terminal, or in a pipe: {left_out}", style="dim")
