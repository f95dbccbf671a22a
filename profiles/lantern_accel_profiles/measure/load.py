"""Finds the largest number of requests at once that a service has answered within a latency."""

from __future__ import annotations

from collections.abc import Sequence

from lantern_accel_profiles.measure.record import LoadCell

#: The share of requests that must stay within the latency.
SHARE = 0.95
#: Requests that count in a level at least: of fewer, one alone would be the slowest twentieth.
LEAST = 20


def holds(cell: LoadCell, latency: float) -> bool:
    """Say whether a service stayed within ``latency`` seconds under this load; p95 decides."""
    return cell.latency(SHARE) <= latency


def largest(cells: Sequence[LoadCell], latency: float) -> LoadCell | None:
    """Return the largest load that stays within ``latency``, below the first that does not.

    None where none does. Noise may let a larger load pass; it does not count above one that failed.
    """
    failed = min((one.clients for one in cells if not holds(one, latency)), default=None)
    good = [one for one in cells if holds(one, latency) and (not failed or one.clients < failed)]
    return max(good, key=lambda one: one.clients, default=None)
