"""Races: several ways of doing the same work, timed in turns on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lantern_accel.device.backend import Backend
from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import Environment
from lantern_accel_profiles.measure.samples import interleave
from lantern_accel_profiles.quality.interval import relative_spread
from lantern_accel_profiles.store import Keeper

Done = dict[str, float]
"""How much a run did, by unit: ``{"tokens": 256, "steps": 80}``."""


class Lap(Record):
    """One timed run: wall seconds, the seconds of all this process's threads, and the work done."""

    seconds: float
    cpu_seconds: float
    work: Done


class Runner(Record):
    """All laps of one way of doing the work; ``first_seconds`` is its first run, compiling included."""

    name: str
    note: str = ""
    first_seconds: float | None = None
    laps: list[Lap] = Field(default_factory=list)

    def ms(self, unit: str, *, cpu: bool = False) -> float:
        """Median milliseconds per ``unit``, of wall time or of all threads' time."""
        return 1e3 * statistics.median(self._each(unit, cpu))

    def _each(self, unit: str, cpu: bool) -> list[float]:
        return [(lap.cpu_seconds if cpu else lap.seconds) / lap.work[unit] for lap in self.laps]


class Race(Record):
    """A race; ``settings`` must agree for one to be resumed."""

    kind: Literal["lantern_accel.race"] = "lantern_accel.race"
    schema_version: Literal[2] = 2
    settings: dict[str, Any]
    environment: Environment
    checks: dict[str, Any] = Field(default_factory=dict)
    runners: list[Runner] = Field(default_factory=list)

    def table(self) -> str:
        """Return a Markdown table, one row per runner and unit; ratios are to the first runner."""
        lines = [
            "| | unit | ms per unit | ± | per second | per CPU second | speed-up | first run |",
            "|---|---|---|---|---|---|---|---|",
        ]
        ran = [runner for runner in self.runners if runner.laps]
        for unit in ran[0].laps[0].work if ran else ():
            for one in ran:
                ms, cpu = one.ms(unit), one.ms(unit, cpu=True)
                first = "" if one.first_seconds is None else f"{one.first_seconds:.1f} s"
                spread = relative_spread(one._each(unit, False))
                lines.append(
                    f"| {one.name} | {unit} | {ms:.3f} | {'' if spread is None else f'{spread:.0%}'} "
                    f"| {1e3 / ms:.1f} | {1e3 / cpu if cpu else float('nan'):.1f} "
                    f"| {ran[0].ms(unit) / ms:.2f}x | {first} |"
                )
        return "\n".join(lines)


def time_lap(backend: Backend, run: Callable[[], Done]) -> Lap:
    """Run once between two waits for the device; ``run`` says what it did."""
    with backend.stopwatch() as watch:
        began = time.process_time()
        done = run()
        backend.synchronize()
        cpu = time.process_time() - began
    return Lap(seconds=watch.seconds, cpu_seconds=cpu, work=done)


def race(
    backend: Backend,
    report: Race,
    runners: Mapping[str, Callable[[], Done]],
    *,
    repeats: int,
    warmups: int = 1,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Race:
    """Give every runner of ``report`` (which ``runners`` has by name) ``repeats`` laps, in turns.

    Laps that the report already has count. ``out`` is written after every lap.
    """
    keep = Keeper(out, report)
    entries = [entry for entry in report.runners if entry.name in runners]
    for entry in (entry for entry in entries if len(entry.laps) < repeats):
        say(f"warm-up: {entry.name}")
        began = time.perf_counter()
        runners[entry.name]()
        backend.synchronize()
        if entry.first_seconds is None:
            entry.first_seconds = time.perf_counter() - began
        for _ in range(warmups - 1):
            runners[entry.name]()
    for entry in interleave(entries, lambda e: len(e.laps), lambda e: len(e.laps) >= repeats):
        entry.laps.append(time_lap(backend, runners[entry.name]))
        say(f"lap {len(entry.laps)} of {repeats}, {entry.name}: {entry.laps[-1].seconds:.3f} s")
        keep()
    keep()
    return report
