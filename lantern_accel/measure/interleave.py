"""Races: several ways of doing the same work, timed alternately on one device.

What disturbs a machine for a while then disturbs all of them. Every lap starts with the next
runner, so that none always follows the same one.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_accel.device.backend import Backend
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json

Stored = TypeVar("Stored", bound=BaseModel)


Work = dict[str, float]
"""How much of what a run did, by unit: ``{"tokens": 256, "steps": 80}``."""


class Lap(BaseModel):
    """One timed run: wall seconds, the seconds of all this process's threads, and the work done."""

    model_config = ConfigDict(extra="forbid")

    seconds: float
    cpu_seconds: float
    work: Work


class Runner(BaseModel):
    """All laps of one way of doing the work; ``first_seconds`` is its first run, compiling included."""

    model_config = ConfigDict(extra="forbid")

    name: str
    note: str = ""
    first_seconds: float | None = None
    laps: list[Lap] = Field(default_factory=list)

    def ms(self, unit: str, *, cpu: bool = False) -> float:
        """Median milliseconds for one of ``unit``, of wall time or of all threads' time."""
        return 1e3 * statistics.median(self._each(unit, cpu))

    def spread(self, unit: str) -> float:
        """See :func:`relative_spread`, of the time for one of ``unit``."""
        return relative_spread(self._each(unit, False))

    def _each(self, unit: str, cpu: bool) -> list[float]:
        laps = self.laps
        return [(one.cpu_seconds if cpu else one.seconds) / one.work[unit] for one in laps]


class Race(BaseModel):
    """A race; ``settings`` must agree for one to be continued."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    settings: dict[str, Any]
    environment: dict[str, Any]
    checks: dict[str, Any] = Field(default_factory=dict)
    runners: list[Runner] = Field(default_factory=list)

    def table(self) -> str:
        """Return a Markdown table, a line a runner and unit; ratios are to the first runner."""
        lines = [
            "| | unit | ms each | ± | per second | per CPU second | speed-up | first run |",
            "|---|---|---|---|---|---|---|---|",
        ]
        ran = [runner for runner in self.runners if runner.laps]
        for unit in ran[0].laps[0].work if ran else ():
            base = ran[0].ms(unit)
            for one in ran:
                ms, cpu = one.ms(unit), one.ms(unit, cpu=True)
                first = "" if one.first_seconds is None else f"{one.first_seconds:.1f} s"
                lines.append(
                    f"| {one.name} | {unit} | {ms:.3f} | {100 * one.spread(unit):.0f} % "
                    f"| {1e3 / ms:.1f} | {1e3 / cpu if cpu else float('nan'):.1f} "
                    f"| {base / ms:.2f}x | {first} |"
                )
        return "\n".join(lines)


def relative_spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles (of few values: the ends) over the median."""
    ordered = sorted(values)
    if len(ordered) < 4:
        return (ordered[-1] - ordered[0]) / 2 / statistics.median(ordered)
    low, _, high = statistics.quantiles(ordered, n=4)
    return (high - low) / 2 / statistics.median(ordered)


def environment(backend: Backend, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a reader needs to judge figures measured on this device now."""
    import lantern_accel

    return {
        "device": backend.facts().model_dump(mode="json"),
        "backend": f"{backend.name} {backend.version}",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "lantern_accel": lantern_accel.__version__,
    }


def read_stored(path: Path, kind: type[Stored], settings: Mapping[str, Any]) -> Stored:
    """Read a report to continue; raises :class:`RequestError` where it is of another kind or setting."""
    try:
        stored = kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        raise RequestError(
            f"{path} is not a {kind.__name__} of this version; name another file or delete it"
        ) from None
    kept: dict[str, Any] = vars(stored)["settings"]
    keys = {*kept, *settings}
    # Plain values first: they say what differs in fewer words than a table of sizes.
    for key in sorted(keys, key=lambda one: (isinstance(kept.get(one), dict), one)):
        if kept.get(key) != settings.get(key):
            raise RequestError(
                f"{path} was measured with {key} {kept.get(key)!r}, not {settings.get(key)!r}; name "
                "another file or delete it"
            )
    return stored


def timed(backend: Backend, run: Callable[[], Work | Lap]) -> Lap:
    """Run once between two waits for the device; ``run`` says what it did.

    A run that returns a :class:`Lap` has looked at the clock itself, to leave a part out.
    """
    with backend.stopwatch() as watch:
        began = time.process_time()
        done = run()
        backend.synchronize()
        cpu = time.process_time() - began
    return done if isinstance(done, Lap) else Lap(seconds=watch.seconds, cpu_seconds=cpu, work=done)


def race(
    backend: Backend,
    report: Race,
    runners: Mapping[str, Callable[[], Work | Lap]],
    *,
    repeats: int,
    warmups: int = 1,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Race:
    """Give every runner of ``report`` (which ``runners`` has by name) ``repeats`` laps, alternately.

    Laps that the report already has count. ``out`` is written after every lap.
    """
    entries = [entry for entry in report.runners if entry.name in runners]
    for entry in entries:
        if len(entry.laps) >= repeats:
            continue
        say(f"warm-up: {entry.name}")
        began = time.perf_counter()
        runners[entry.name]()
        backend.synchronize()
        if entry.first_seconds is None:
            entry.first_seconds = time.perf_counter() - began
        for _ in range(warmups - 1):
            runners[entry.name]()
    for lap in range(repeats):
        turn = lap % len(entries)
        for entry in entries[turn:] + entries[:turn]:
            if len(entry.laps) > lap:
                continue
            entry.laps.append(timed(backend, runners[entry.name]))
            say(f"lap {lap + 1} of {repeats}, {entry.name}: {entry.laps[-1].seconds:.3f} s")
            if out is not None:
                write_json(out, report.model_dump(mode="json"))
    if out is not None:
        write_json(out, report.model_dump(mode="json"))
    return report
