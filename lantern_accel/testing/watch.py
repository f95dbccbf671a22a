"""Watching a check from a second thread: what it does while it takes long, and when it must end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from lantern_accel.testing.result import doing_now

#: Told the check's name, what it does, and the seconds that it has taken.
Wait = Callable[[str, str, float], None]
#: Seconds between two words about a check that takes long.
EVERY = 10.0


class TimeLimit(BaseException):
    """A check took longer than it may. No ``Exception``: a check must not take it for its own."""


class Watch:
    """Tells ``on_wait`` what a block does, and ends it by :class:`TimeLimit` after ``limit`` seconds.

    A block is ended where it next runs Python; while a driver or compiler does not return, ``on_wait``
    goes on telling what it was called for.
    """

    def __init__(self, name: str, limit: float | None, on_wait: Wait | None) -> None:
        self.name, self.limit, self.on_wait = name, limit, on_wait
        self._done = threading.Event()
        self._raised = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watched = threading.get_ident()

    def __enter__(self) -> Watch:
        if self.limit is not None or self.on_wait is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._done.set()
            if self._raised:
                # One that is under way comes too late. Not otherwise: CPython 3.11 looks for what is
                # pending for ever after, and a profiled function then never begins.
                _raise_in(self._watched, None)

    def _watch(self) -> None:
        began = time.perf_counter()
        ended = False
        while True:
            waited = time.perf_counter() - began
            left = EVERY if self.limit is None or ended else self.limit - waited
            if self._done.wait(max(min(EVERY, left), 0.0)):
                return
            waited = time.perf_counter() - began
            with self._lock:
                if self._done.is_set():
                    return
                if not ended and self.limit is not None and waited >= self.limit:
                    ended = self._raised = True
                    _raise_in(self._watched, TimeLimit)
                    continue
            if self.on_wait is not None:
                self.on_wait(self.name, doing_now(), waited)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread; None takes back one that has not been raised yet."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
