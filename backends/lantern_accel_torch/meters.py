"""A meter of energy for a device that only says what it draws now: readings of that, added up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Seconds between two readings.
EVERY = 0.05


class PowerMeter:
    """Adds up the power that a device draws, which a thread of its own reads 20 times a second.

    ``watts`` reads it. Between two readings the power is taken for their mean; where one fails, for the
    one before.
    """

    def __init__(self, watts: Callable[[], float | None]) -> None:
        self._watts, self._joules = watts, 0.0
        self._at, self._power = time.monotonic(), watts() or 0.0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="power meter", daemon=True)
        self._thread.start()

    def millijoules(self) -> int:
        """Return the energy since the meter began, until now."""
        with self._lock:
            power, now = self._watts(), time.monotonic()
            power = self._power if power is None else power
            self._joules += (now - self._at) * (power + self._power) / 2
            self._at, self._power = now, power
            return round(1000 * self._joules)

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self.millijoules()

    def close(self) -> None:
        """Stop reading."""
        self._over.set()
        self._thread.join()
