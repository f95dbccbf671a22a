"""Reports progress of trainers and evaluations: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import sys
import time
from typing import IO, Any


class Progress:
    """Where trainers and evaluations report their progress; this one shows nothing."""

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a stage of ``total`` steps (unknown if None)."""

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Report ``steps`` more, with the latest metrics, such as ``loss=0.12``."""

    def log(self, message: str) -> None:
        """Print one line."""

    def finish(self) -> None:
        """End the stage."""


def _words(metrics: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class LineProgress(Progress):
    """Plain lines, one every ``every`` seconds: for log files and pipes."""

    def __init__(self, every: float = 15.0, stream: IO[str] | None = None) -> None:
        self._every = every
        self._stream = stream or sys.stderr

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a stage and announce it."""
        self._label, self._total, self._done, self._said_done = label, total, 0, 0
        self._began = self._said = time.monotonic()
        self._metrics: dict[str, float] = {}
        self.log(f"{label}: {total} steps" if total is not None else label)

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Count ``steps``; print a line where the last is long enough ago."""
        self._done += steps
        self._metrics.update(metrics)
        now = time.monotonic()
        if now - self._said >= self._every:
            rate = (self._done - self._said_done) / (now - self._said)
            of = left = ""
            if self._total is not None:
                of = f"/{self._total}"
                left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 else ""
            self._said, self._said_done = now, self._done
            self.log(f"{self._label} {self._done}{of} {_words(self._metrics)} ({rate:.2f}/s{left})")

    def log(self, message: str) -> None:
        """Print one line."""
        print(message, file=self._stream, flush=True)

    def finish(self) -> None:
        """Print the stage's total."""
        took = time.monotonic() - self._began
        count = f"{self._done} in " if self._done else ""
        self.log(f"{self._label}: {count}{took:.1f} s {_words(self._metrics)}".rstrip())


class BarProgress(Progress):
    """A rich bar: step, metrics, rate, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self._metrics: dict[str, float] = {}

    def start(self, label: str, total: int | None = None) -> None:
        """Show a new bar."""
        self._metrics = {}
        self._task = self._bar.add_task(label, total=total, metrics="", rate="")
        self._bar.start()

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Move the bar."""
        self._metrics.update(metrics)
        self._bar.advance(self._task, steps)
        speed = self._bar.tasks[-1].speed
        rate = f"{speed:.1f}/s" if speed else ""
        self._bar.update(self._task, metrics=_words(self._metrics), rate=rate)

    def log(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(message, highlight=False, markup=False)

    def finish(self) -> None:
        """Stop the bar and leave it on screen."""
        self._bar.stop()


def console_progress() -> Progress:
    """Return a bar where standard error is a terminal, else plain lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()
