"""Reads how much of the host's processor other programs use: times taken meanwhile are longer."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Share of the host's cores above which other programs are named, and no speed is judged.
BUSY = 0.1


class HostLoad:
    """The share of the host's cores that other processes used since a moment.

    Reads ``/proc/stat``; where there is none, :meth:`share` says so.
    """

    def __init__(self) -> None:
        self._ticks = _system_ticks()
        self._own = self.ours()
        self._at = time.perf_counter()

    def ours(self) -> float:
        """Return the seconds that this process has used."""
        return _own_seconds()

    def share(self) -> float | str:
        """Return the share, 0 to 1 of all cores, until now; text: why it is not known."""
        ticks = _system_ticks()
        if self._ticks is None or ticks is None:
            return "the system has no /proc/stat"
        elapsed = time.perf_counter() - self._at
        cores = os.cpu_count() or 1
        if elapsed < 0.05:
            return "the sample is shorter than the system's clock tick shows"
        busy = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
        share = (busy - (self.ours() - self._own)) / (elapsed * cores)
        return min(max(share, 0.0), 1.0)


def _own_seconds() -> float:
    return sum(os.times()[:4])  # user and system, with those of children


def _system_ticks() -> int | None:
    """Return the busy ticks of all cores: user, nice, system, irq, softirq, steal."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        values = [int(field) for field in fields[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = values
    return user + nice + system + irq + softirq + steal
