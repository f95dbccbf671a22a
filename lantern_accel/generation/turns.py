"""One call of a pipeline at a time, from however many threads; none from within another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lantern_accel.errors import RequestError


class Turns:
    """Gives each call its turn, until :attr:`over` is set."""

    def __init__(self) -> None:
        self.over = False
        self._lock = threading.Lock()
        self._inside: int | None = None

    @contextmanager
    def take(self, last: bool = False) -> Iterator[None]:
        """Let one call run at a time; ``last``: also where the pipeline is closed already.

        Raises RequestError where a call is made from within another, or too late.
        """
        me = threading.get_ident()
        if self._inside == me:
            raise RequestError(
                "this pipeline is drawing, and was called again from within (by on_progress or "
                "on_images); wait until the call returns, or load a second pipeline"
            )
        with self._lock:
            if self.over and not last:
                raise RequestError("this pipeline is closed; load the model again")
            self._inside = me
            try:
                yield
            finally:
                self._inside = None
