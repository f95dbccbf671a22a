"""Calls plug-ins with a time limit, so that nothing one does stops the others, not even by hanging."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

from lantern_accel.errors import LanternWarning

Made = TypeVar("Made")

#: Seconds that a plug-in may take to load, to prepare or to look for its device.
LOOKING = 10.0
#: Seconds that a device may take to be closed.
CLOSING = 10.0
#: How often is looked whether time that does not count has passed.
_POLL_SECONDS = 0.05


class TooLong(Exception):
    """A call did not return within its time; its thread goes on and is waited for no more."""


def in_time(call: Callable[[], Made], seconds: float) -> Made:
    """Return what ``call`` returns; raise what it raises, or :class:`TooLong` after ``seconds``.

    It runs in a thread of its own, because a driver that hangs cannot be interrupted. SystemExit and
    KeyboardInterrupt come out as :class:`RuntimeError`: a plug-in does not end the program.
    The import of torch takes what it takes and does not count.
    """
    made: list[Made] = []
    errors: list[BaseException] = []
    threads: list[int | None] = []

    def run() -> None:
        try:
            made.append(call())
        except BaseException as error:
            errors.append(error)
        threads.append(_torch_threads())

    thread = threading.Thread(target=run, daemon=True, name="lantern-accel plug-in")
    thread.start()
    left = seconds
    while thread.is_alive() and left > 0:
        began = time.monotonic()
        thread.join(min(_POLL_SECONDS, left))
        if not _importing_torch():
            left -= time.monotonic() - began
    if not errors and not made:
        raise TooLong(f"it did not return within {seconds:g} s")
    _take_threads(threads[0] if threads else None)
    if made:
        return made[0]
    error = errors[0]
    if isinstance(error, Exception):
        raise error
    code = f": {error}" if str(error) else ""
    raise RuntimeError(f"{type(error).__name__}{code}") from error


def close_in_time(backend: str, close: Callable[[], object], what: str = "") -> None:
    """Run ``close``, which releases the device of a named backend; warn where it fails or hangs.

    ``what``: the end of the warning, such as what is kept all the same.
    """
    try:
        in_time(close, CLOSING)
    except Exception as error:
        failure = f"backend {backend!r} was not closed ({type(error).__name__}: {error})"
        warnings.warn("; ".join(filter(None, (failure, what))), LanternWarning, stacklevel=3)


def _importing_torch() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(getattr(torch.__spec__, "_initializing", False))


def _torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None and not _importing_torch() else None


def _take_threads(count: int | None) -> None:
    """Let this thread compute with as many threads as the call left: OpenMP counts by thread."""
    torch = sys.modules.get("torch")
    if count is not None and torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)
