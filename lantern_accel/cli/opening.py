"""Opening a model for a command: bars for loading, lines for licences and downloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.cli.console import say

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

Advance = Callable[[int, int], None]


@contextmanager
def bar(
    title: str, quiet: bool, *, unit: str = "", bytes_: bool = False
) -> Iterator[Advance | None]:
    """Show a live bar where standard error is a terminal; gives a function of done and total."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn() if bytes_ else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(title, total=None)
        yield lambda done, total: live.update(task, completed=done, total=total)


@contextmanager
def opened(model: str | Path, quiet: bool = False, **options: Any) -> Iterator[Pipeline]:
    """Load a model with a bar and close it after the block; ``options`` are those of ``load``."""
    import lantern_accel

    def tell(text: str) -> None:
        say(text, to_stderr=True, style="dim")

    with bar("loading", quiet, bytes_=True) as advance:

        def loading(part: str, done: int, total: int) -> None:
            if advance is not None:
                advance(done, total)

        pipeline = lantern_accel.load(model, tell=tell, on_loading=loading, **options)
    with pipeline:
        if pipeline.backend.slowed and not quiet:
            say(pipeline.backend.slowed, label="slow", style="yellow", to_stderr=True)
        yield pipeline
