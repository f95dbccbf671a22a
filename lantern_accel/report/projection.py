"""Projects a device that was not measured by its roofline, and says how wrong that is on those that were.

A phase of a step takes ``max(operations / peak, bytes / bandwidth) + launches x cost of a launch``; a
request takes its prefill and as many steps as the measured acceptance makes it. On the device of the run
launches are those that it counted. On any other they are the reference's operators, since a native call
of one device hides what another would launch: a run without that count is not projected. A projection
is a type of its own: rankings refuse it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from lantern_accel.device.datasheets import DeviceProfile
from lantern_accel.measure.record import Cell, Run, Work, is_measured
from lantern_accel.measure.work import floor_seconds
from lantern_accel.records import Frozen

#: Seconds per launch where nobody has measured it: a kernel in a recorded graph, not a Python call.
ASSUMED_LAUNCH = 2e-6


class ProjectionError(ValueError):
    """A projected figure is where only measured ones may be."""


@dataclass(frozen=True)
class Limits:
    """A device as the roofline sees it: FLOP/s, bytes per second, seconds per launch."""

    flops: float
    bandwidth: float
    launch: float
    source: str
    launch_assumed: bool = False
    """Nobody measured what a launch costs here."""


class Projected(Frozen):
    """A projected speed of one strategy at one batch size and temperature: never measured or ranked."""

    measured: Literal[False] = False
    device: str
    strategy: str
    batch: int
    temperature: float
    profile: str
    tokens_per_second: float
    bound: str = Field(description="what the time goes to: bytes, operations or launches")
    assumed: bool = Field(description="what binds is the assumed cost of a launch")
    acceptance_from: str
    assumptions: str


def limits_of_profile(profile: DeviceProfile, dtype: str) -> Limits | None:
    """Return a profile's limits in ``dtype``; None where it does not give them."""
    figures = profile.reached_flops.get(dtype) or profile.peak_flops.get(dtype)  # type: ignore[call-overload]
    if figures is None or profile.bandwidth_bytes_per_s is None:
        return None
    known = profile.launch_seconds
    launch = ASSUMED_LAUNCH if known is None else known.value
    return Limits(
        figures.value,
        profile.bandwidth_bytes_per_s.value,
        launch,
        f"{figures.kind} {figures.value / 1e12:g} TFLOP/s in {dtype}, "
        f"{profile.bandwidth_bytes_per_s.kind} {profile.bandwidth_bytes_per_s.value / 1e9:g} GB/s, "
        f"{'assumed' if known is None else known.kind} {launch * 1e6:g} \N{MICRO SIGN}s per launch",
        launch_assumed=known is None,
    )


def limits_of_run(run: Run, cell: Cell) -> Limits | None:
    """Return the ceilings that a run measured on its own device; None where it has none."""
    if isinstance(run.ceilings, str):
        return None
    c = run.ceilings
    flops = c.matmul_flops.get(run.settings.dtype)
    launch = c.captured_launch_seconds if cell.captured else c.launch_seconds
    if not (is_measured(flops) and is_measured(c.bandwidth) and is_measured(launch)):
        return None
    return Limits(flops, c.bandwidth, launch, "ceilings measured in the same run")


def phase_seconds(work: Work, limits: Limits) -> float:
    """Return the roofline's seconds of one phase, launches included."""
    floor = floor_seconds(work.flops, work.bytes, limits.flops, limits.bandwidth)
    return floor + work.launches * limits.launch


def projected_rate(
    cell: Cell, tokens: int, limits: Limits, *, elsewhere: bool = False
) -> tuple[float, str]:
    """Return tokens per second of a cell on a device, and what binds its steps.

    ``tokens`` per image; ``elsewhere``: on another device than the cell's own. Raises ProjectionError
    where the cell lacks its work, has no sample, or, for elsewhere, its operators were not counted.
    """
    work = cell.work
    if isinstance(work, str) or not cell.samples:
        raise ProjectionError(f"{cell.name} has no work or no sample to project from")
    if elsewhere:
        if not counts_operators(work):
            raise ProjectionError(
                f"{cell.name} counts only what its own device launched, so nothing follows for another; "
                "measure it again with this version"
            )
        work = {name: w.model_copy(update={"launches": w.operators}) for name, w in work.items()}
    step = [one for name, one in work.items() if name != "prefill"]
    steps = statistics.median(s.steps / s.images for s in cell.samples)
    prefill = phase_seconds(work["prefill"], limits) if "prefill" in work else 0.0
    seconds = prefill + steps * sum(phase_seconds(one, limits) for one in step)
    parts = {
        "operations": sum(one.flops for one in step) / limits.flops,
        "bytes": sum(one.bytes for one in step) / limits.bandwidth,
        "launches": sum(one.launches for one in step) * limits.launch,
    }
    return cell.batch * tokens / seconds, max(parts, key=lambda name: parts[name])


def counts_operators(work: Mapping[str, Work]) -> bool:
    """Return whether it is known what the work would launch on a device that fuses nothing."""
    verify = work.get("verify")
    known = all(one.operators is not None for one in work.values())
    return known and (verify is None or bool(verify.operators))


def project(run: Run, cell: Cell, profile: DeviceProfile) -> Projected | None:
    """Project a measured cell onto a profiled device; None where the profile lacks the dtype.

    Raises ProjectionError as :func:`projected_rate`.
    """
    limits = limits_of_profile(profile, run.settings.dtype)
    if limits is None:
        return None
    rate, bound = projected_rate(cell, run.settings.tokens, limits, elsewhere=True)
    return Projected(
        device=f"{profile.vendor} {profile.model}",
        profile=profile.name,
        strategy=cell.strategy.name,
        batch=cell.batch,
        temperature=cell.temperature,
        tokens_per_second=rate,
        bound=bound,
        assumed=limits.launch_assumed and bound == "launches",
        acceptance_from=run.name,
        assumptions=limits.source,
    )


def model_errors(runs: Sequence[Run]) -> list[float]:
    """Return projected over measured tokens per second of each cell, by its own run's ceilings.

    2 promises twice what was seen.
    """
    found = []
    for run in runs:
        for cell in run.cells:
            limits = limits_of_run(run, cell)
            if limits is not None and cell.samples and not isinstance(cell.work, str):
                rate, _ = projected_rate(cell, run.settings.tokens, limits)
                found.append(rate / cell.tokens_per_second)
    return found


def refuse_projected(entries: Sequence[object]) -> None:
    """Raise ProjectionError where one of the entries was not measured."""
    for entry in entries:
        if getattr(entry, "measured", None) is not True:
            name = getattr(entry, "device", type(entry).__name__)
            raise ProjectionError(
                f"{name!r} is projected, not measured, and cannot stand in a ranking; show it in the "
                "table of projections"
            )
