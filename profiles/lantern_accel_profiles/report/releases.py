"""How one device changes over releases of this project, of torch or of its driver."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from lantern_accel.errors import RequestError
from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import Interval, NotMeasured, Run
from lantern_accel_profiles.quality.interval import Verdict, unpaired_ratio
from lantern_accel_profiles.quality.interval import verdict as judge
from lantern_accel_profiles.report.names import PROPERTIES, short_device
from lantern_accel_profiles.report.points import Key, Point

Over = Literal["commits", "torch", "driver"]
#: What each asks for, as names of runs call it.
VERSION: dict[str, str] = {"commits": "commit", "torch": "torch", "driver": "driver"}


class Release(Record):
    """One strategy on one device at one version."""

    device: str
    version: str
    measured: str = Field(description="the day")
    run: str
    strategy: str
    batch: int
    images_per_second: Interval
    ratio: Interval | NotMeasured | None = Field(description="over the first version; None: it is")
    verdict: Verdict | NotMeasured | None
    also: list[str] = Field(description="what else differs from the first version")


def releases(
    runs: Sequence[Run], points: Sequence[Point], seconds: Mapping[Key, list[float]], over: Over
) -> list[Release]:
    """Return a line of releases for each device and exact strategy that all of its versions have.

    Commits are in the order in which they were measured, other versions in that of their numbers.
    Raises RequestError where no device was measured at two versions.
    """
    axis = VERSION[over]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda one: _order(one, axis)):
        if any(one.run == run.name and not one.service for one in points):
            groups.setdefault(_same(run), []).append(run)
    several = [
        group for group in groups.values() if len({PROPERTIES[axis][0](run) for run in group}) > 1
    ]
    found = [one for group in several for one in _lines(group, points, seconds, axis)]
    if not found:
        raise RequestError(
            f"no device was measured at two versions of {axis} with the same settings, exact strategy "
            f"and batch size; name runs of both, or leave --over {over} out"
        )
    return found


def _same(run: Run) -> tuple[str, ...]:
    """Return what all runs of one line share: device, model and settings, versions left out."""
    rest = [read(run) for name, (read, _) in PROPERTIES.items() if name not in _VERSIONS]
    return short_device(run.environment.device.name), run.settings.model, *rest


_VERSIONS = ("torch", "driver", "commit", "kernels")


def _order(run: Run, axis: str) -> tuple[list[int], str]:
    version = PROPERTIES[axis][0](run)
    numbers = [] if axis == "commit" else [int(one) for one in re.findall(r"\d+", version)]
    return numbers, run.sessions[0].started if run.sessions else ""


def _lines(
    group: Sequence[Run], points: Sequence[Point], seconds: Mapping[Key, list[float]], axis: str
) -> list[Release]:
    by_run = [
        {p.key[1:]: p for p in points if p.run == run.name and p.moved == 0 and not p.service}
        for run in group
    ]
    shared = set.intersection(*(set(one) for one in by_run))
    batch = min((key[1] for key in shared), default=0)
    found: list[Release] = []
    for key in sorted(key for key in shared if key[1] == batch):
        first = by_run[0][key]
        for run, mine in zip(group, by_run, strict=True):
            point = mine[key]
            ratio: Interval | str | None = None
            verdict: str | None = None
            if run is not group[0]:
                ratio = unpaired_ratio(seconds[first.key], seconds[point.key])
                verdict = judge(ratio, unsettled=first.unsettled or point.unsettled)
                ratio = verdict if first.doubt or point.doubt else ratio
            differ = [
                f"{name} {read(run)}"
                for name, (read, _) in PROPERTIES.items()
                if name != axis and read(run) != read(group[0])
            ]
            found.append(
                Release(
                    device=short_device(run.environment.device.name),
                    version=PROPERTIES[axis][0](run),
                    measured=run.sessions[0].started[:10] if run.sessions else "unknown",
                    run=run.name,
                    strategy=point.strategy,
                    batch=point.batch,
                    images_per_second=point.images_per_second,
                    ratio=ratio,
                    verdict=verdict,
                    also=differ,
                )
            )
    return found
