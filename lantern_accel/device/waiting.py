"""Says what takes time, and goes on saying so: a pipe has no bar."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds between two lines.
EVERY = 5.0


@contextmanager
def repeating(call: Callable[[float], None], seconds: float) -> Iterator[None]:
    """Give ``call`` the seconds that the block has taken, every few of them, from another thread."""
    began, over = time.monotonic(), threading.Event()

    def go_on() -> None:
        while not over.wait(seconds):
            call(time.monotonic() - began)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def waiting(text: str, log: logging.Logger, level: int = logging.INFO) -> Iterator[None]:
    """Log ``text`` now, how long it has taken every few seconds, and how long it took at the end."""
    log.log(level, "%s", text)
    began = time.monotonic()
    with repeating(lambda taken: log.log(level, "%s: %.0f s so far", text, taken), EVERY):
        yield
    log.log(level, "%s: done in %.1f s", text, time.monotonic() - began)
