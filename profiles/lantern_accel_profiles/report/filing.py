"""Checks whether a run can be published or filed among the measured ones, and files it.

A run is rejected if it is incomplete, its clocks disagree, or its rates are above the device's datasheet.
Lesser faults, such as few samples, are printed as notes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lantern_accel.device.datasheets import DeviceProfile, Figure
from lantern_accel.device.host_load import BUSY
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json
from lantern_accel_profiles.measure.record import STEP_PHASES, Run, is_measured
from lantern_accel_profiles.quality.interval import FEWEST
from lantern_accel_profiles.report.rows import clock_jumps, describe_disturbance, others_share
from lantern_accel_profiles.report.writing import percent
from lantern_accel_profiles.store import COMMIT

#: How far a figure may lie above a datasheet's limit: clocks and datasheets give rounded figures.
SLACK = 1.05
#: Stopwatch over host clock on work of a known end, where both see the same.
CLOCKS = (0.9, 1.1)


def publication_faults(run: Run) -> list[str]:
    """Return why a run is not for publication, in a few words each; nothing: it is.

    Others need raw samples, the time of measurement and the readings of a meter to check a figure.
    """
    found = []
    if run.state != "complete":
        found.append(f"the run is {run.state}")
    fewest = min((len(cell.samples) for cell in run.cells), default=0)
    if fewest < FEWEST:
        found.append(f"{fewest or 'no'} raw samples of a strategy, at least {FEWEST} are needed")
    # A session that was killed has no end; its samples say when they were taken.
    timed = run.sessions and run.sessions[-1].ended and all(one.started for one in run.sessions)
    if not timed:
        found.append("the time of measurement is unknown")
    if all(s.energy_mj is None for cell in run.cells for s in cell.samples):
        found.append("no energy meter was read")
    if not COMMIT.fullmatch(run.environment.commit):
        found.append("the commit is unknown")
    elif run.environment.dirty is not False:
        found.append("the code had uncommitted changes")
    shares = [share for cell in run.cells if (share := others_share(cell)) is not None]
    if not shares and any(cell.samples for cell in run.cells):
        found.append("the load of other programs is unknown")
    if max(shares, default=0.0) > BUSY:
        found.append(f"other programs used up to {percent(max(shares))} of the host")
    return found


class Examined(NamedTuple):
    """What was found in a run: ``faults`` forbid filing it, ``notes`` go with it."""

    faults: list[str]
    notes: list[str]


def examine(run: Run, profiles: Sequence[DeviceProfile]) -> Examined:
    """Check a run for completeness, agreeing clocks and plausible rates."""
    device = run.environment.device
    known = next((one for one in profiles if one.matches(device.backend, device.name)), None)
    faults = [] if known is None else _beyond(run, known)
    if run.state != "complete":
        faults.insert(0, f"it is {run.state}; `{run.command} --resume` completes it")
    if not run.cells:
        faults.append("it holds no measurement of requests")
    few = [cell for cell in run.cells if len(cell.samples) < 2]
    faults += [f"{c.name}: it has {len(c.samples)} samples, at least two are needed" for c in few]
    jumps = [cell for cell in run.cells if clock_jumps(cell.samples)]
    faults += [f"{cell.name}: {describe_disturbance(cell)}" for cell in jumps]
    if isinstance(run.clock, str):
        faults.append(f"its stopwatch was not checked ({run.clock})")
    elif not CLOCKS[0] <= run.clock.ratio <= CLOCKS[1]:
        faults.append(
            f"its stopwatch read {run.clock.ratio:.2f} of the host's clock on work of a known end"
        )
    notes = [f"not for publication: {one}" for one in publication_faults(run)]
    if run.settings.plan.quick:
        notes.append("quick: few samples, so that its intervals are wide")
    if known is None:
        notes.append(
            f"no datasheet of {device.name!r} is known, so its rates were compared with none; add "
            "profiles/datasheets/NAME.toml to have them compared"
        )
    return Examined(faults, notes)


def _beyond(run: Run, profile: DeviceProfile) -> list[str]:
    """Return what a run claims beyond a device's datasheet; measured limits forbid nothing."""

    def limit(figure: Figure | None) -> float:
        return figure.value if figure is not None and figure.kind == "datasheet" else math.inf

    dtype = run.environment.dtype
    width, memory = limit(profile.bandwidth_bytes_per_s), limit(profile.memory_bytes)
    flops = limit(next((f for name, f in profile.peak_flops.items() if name == dtype), None))
    chip = profile.on_chip_bytes.value if profile.on_chip_bytes is not None else 0.0
    claims: list[tuple[str, float, float, float, str]] = []
    if not isinstance(run.ceilings, str):
        for name in ("copy_bytes_per_s", "read_bytes_per_s"):
            if is_measured(rate := getattr(run.ceilings, name)):
                claims.append((f"{name} is", rate, width, 1e9, "GB/s"))
    for cell in run.cells:
        if cell.samples and not isinstance(cell.work, str):
            seconds = statistics.median(s.decode * s.images / s.steps for s in cell.samples)
            step = [cell.work[name] for name in STEP_PHASES]
            moved, done = (sum(getattr(one, n) for one in step) for n in ("bytes", "flops"))
            would = f"{cell.name}: its steps would"
            if moved > chip:
                claims.append((f"{would} read", moved / seconds, width, 1e9, "GB/s"))
            claims.append((f"{would} do", done / seconds, flops, 1e12, f"TFLOP/s in {dtype}"))
        used = None if isinstance(cell.memory, str) else cell.memory.peak_bytes
        if is_measured(used):
            claims.append((f"{cell.name}: it used", used, memory, 2**30, "GiB"))
    return [
        f"{words} {value / unit:.1f} {name}, and {profile.model} has {most / unit:.1f}"
        for words, value, most, unit, name in claims
        if value > SLACK * most
    ]


def file_name(run: Run) -> str:
    """Return the name that a run is filed under: device, model and dtype."""
    device = run.environment.device
    words = (device.backend, device.name, run.settings.model, run.environment.dtype)
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-.")[:120] + ".json"


def file_run(run: Run, folder: Path, *, overwrite: bool = False) -> Path:
    """Write a run that :func:`examine` found no fault in below ``folder``; return its file.

    Raises RequestError where another run has the name already.
    """
    path = folder / file_name(run)
    if path.exists() and not overwrite:
        raise RequestError(f"{path} is there already; add --overwrite to replace it")
    write_json(path, run.model_dump(mode="json"))
    return path
