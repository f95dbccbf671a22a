"""Serialises the calls of a pipeline, from however many threads, and refuses calls from within one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lantern_accel.errors import RequestError


class RequestLock:
    """Lets one call run at a time, until :attr:`closed` is set."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._inside: int | None = None

    @contextmanager
    def hold(self, last: bool = False) -> Iterator[None]:
        """Hold the lock for one call; ``last``: also where the pipeline is closed already.

        Raises RequestError where a call is made from within another, or too late.
        """
        me = threading.get_ident()
        if self._inside == me:
            raise RequestError(
                "this pipeline is drawing, and was called again from within (by on_progress or "
                "on_images); wait until the call returns, or load a second pipeline"
            )
        with self._lock:
            if self.closed and not last:
                raise RequestError("this pipeline is closed; load the model again")
            self._inside = me
            try:
                yield
            finally:
                self._inside = None
