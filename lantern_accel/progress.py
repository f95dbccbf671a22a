"""Reports progress of trainers and evaluations: in lines, or not at all."""

from __future__ import annotations

import sys
import time
from typing import IO


class Progress:
    """Where trainers and evaluations report their progress: plain lines, for log files and pipes.

    ``every``: seconds between two lines of a stage; None: nothing is printed.
    """

    def __init__(self, every: float | None = None, stream: IO[str] | None = None) -> None:
        self._every, self._stream = every, stream or sys.stderr

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a stage of ``total`` steps (unknown if None)."""
        self._label, self._total, self._done, self._printed_done = label, total, 0, 0
        self._began = self._printed = time.monotonic()
        self._metrics: dict[str, float] = {}
        self.log(f"{label}: {total} steps" if total is not None else label)

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Report ``steps`` more, with the latest metrics, such as ``loss=0.12``."""
        self._done += steps
        self._metrics.update(metrics)
        now = time.monotonic()
        if self._every is not None and now - self._printed >= self._every:
            rate = (self._done - self._printed_done) / (now - self._printed)
            of = left = ""
            if self._total is not None:
                of = f"/{self._total}"
                left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 else ""
            self._printed, self._printed_done = now, self._done
            self.log(f"{self._label} {self._done}{of} {self._words()} ({rate:.2f}/s{left})")

    def log(self, message: str) -> None:
        """Print one line."""
        if self._every is not None:
            print(message, file=self._stream, flush=True)

    def _words(self) -> str:
        return " ".join(f"{name} {value:.4g}" for name, value in self._metrics.items())

    def finish(self) -> None:
        """End the stage and print its total."""
        took = time.monotonic() - self._began
        count = f"{self._done} in " if self._done else ""
        self.log(f"{self._label}: {count}{took:.1f} s {self._words()}".rstrip())


def console_progress() -> Progress:
    """Return progress in lines on standard error, more often where somebody is looking at them."""
    return Progress(every=2.0 if sys.stderr.isatty() else 15.0)
