"""What a roofline expects of a device that was not measured, and how wrong it is on those that were.

A phase of a step takes ``max(operations / peak, bytes / bandwidth) + launches x cost of a launch``; a
request takes its prefill and as many steps as the measured acceptance makes it. Acceptance belongs to
the model and the strategy, not to the device, so it is taken from a measured run. A projection is a type
of its own: rankings refuse it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from lantern_accel.device.datasheets import DeviceProfile
from lantern_accel.measure.record import Cell, Run, Work, is_measured

#: Seconds a launch where nobody has measured it: a kernel in a recorded graph, not a Python call.
ASSUMED_LAUNCH = 2e-6


class ProjectionError(ValueError):
    """A projected figure is where only measured ones may be."""


@dataclass(frozen=True)
class Limits:
    """A device as the roofline sees it: FLOP a second, bytes a second, seconds a launch."""

    flops: float
    bandwidth: float
    launch: float
    source: str


class Projected(BaseModel):
    """A projected speed: never measured, never ranked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    measured: Literal[False] = False
    device: str
    profile: str
    strategy: str
    batch: int
    temperature: float
    tokens_per_second: float
    ceiling_tokens_per_second: float
    """The same without the cost of launches: no software can be faster by this model."""
    bound: str
    """What the time goes to: bytes, operations or launches."""
    acceptance_from: str
    assumptions: str


class Error(BaseModel):
    """Projection against measurement on one cell of a device that has both."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    device: str
    strategy: str
    batch: int
    temperature: float
    measured_tokens_per_second: float
    projected_tokens_per_second: float
    ceiling_tokens_per_second: float
    limits: str

    @property
    def factor(self) -> float:
        """Projected over measured: 2 promises twice what was seen."""
        return self.projected_tokens_per_second / self.measured_tokens_per_second


def limits_of_profile(profile: DeviceProfile, dtype: str) -> Limits | None:
    """Return a profile's limits in ``dtype``; None where it does not give them."""
    figures = profile.reached_flops.get(dtype) or profile.peak_flops.get(dtype)  # type: ignore[call-overload]
    if figures is None or profile.bandwidth_bytes_per_s is None:
        return None
    launch = ASSUMED_LAUNCH if profile.launch_seconds is None else profile.launch_seconds.value
    how = "assumed" if profile.launch_seconds is None else profile.launch_seconds.kind
    return Limits(
        figures.value,
        profile.bandwidth_bytes_per_s.value,
        launch,
        f"{figures.kind} {figures.value / 1e12:g} TFLOP/s in {dtype}, "
        f"{profile.bandwidth_bytes_per_s.kind} {profile.bandwidth_bytes_per_s.value / 1e9:g} GB/s, "
        f"{how} {launch * 1e6:g} \N{MICRO SIGN}s a launch",
    )


def limits_of_run(run: Run, cell: Cell) -> Limits | None:
    """Return the ceilings that a run measured on its own device; None where it has none."""
    if isinstance(run.ceilings, str):
        return None
    c = run.ceilings
    flops = c.matmul_flops.get(run.settings.dtype)
    launch = c.captured_launch_seconds if cell.captured else c.launch_seconds
    if not (is_measured(flops) and is_measured(c.copy_bytes_per_s) and is_measured(launch)):
        return None
    return Limits(flops, c.copy_bytes_per_s, launch, "ceilings measured in the same run")


def phase_seconds(work: Work, limits: Limits) -> float:
    """Return the roofline's seconds of one phase, launches included."""
    return (
        max(work.flops / limits.flops, work.bytes / limits.bandwidth)
        + work.launches * limits.launch
    )


def projected_rate(cell: Cell, tokens: int, limits: Limits) -> tuple[float, str]:
    """Return tokens a second of a cell on a device with these limits, and what binds it.

    ``tokens`` an image. Raises ProjectionError where the cell lacks its work or has no sample.
    """
    work = _work(cell)
    steps = statistics.median(s.steps / s.images for s in cell.samples)
    times = {name: phase_seconds(one, limits) for name, one in work.items()}
    step = sum(seconds for name, seconds in times.items() if name != "prefill")
    total = times.get("prefill", 0.0) + steps * step
    in_step = [one for name, one in work.items() if name != "prefill"]
    parts = {
        "operations": sum(one.flops for one in in_step) / limits.flops,
        "bytes": sum(one.bytes for one in in_step) / limits.bandwidth,
        "launches": sum(one.launches for one in in_step) * limits.launch,
    }
    return cell.batch * tokens / total, max(parts, key=lambda name: parts[name])


def _work(cell: Cell) -> Mapping[str, Work]:
    if isinstance(cell.work, str) or not cell.samples:
        raise ProjectionError(f"{cell.name} has no work or no sample to project from")
    return cell.work


def project(run: Run, cell: Cell, profile: DeviceProfile) -> Projected | None:
    """Project a measured cell onto a profiled device; None where the profile lacks the dtype."""
    limits = limits_of_profile(profile, run.settings.dtype)
    if limits is None:
        return None
    tokens = run.settings.tokens
    rate, bound = projected_rate(cell, tokens, limits)
    bare = Limits(limits.flops, limits.bandwidth, 0.0, limits.source)
    return Projected(
        device=f"{profile.vendor} {profile.model}",
        profile=profile.name,
        strategy=cell.strategy.name,
        batch=cell.batch,
        temperature=cell.temperature,
        tokens_per_second=rate,
        ceiling_tokens_per_second=projected_rate(cell, tokens, bare)[0],
        bound=bound,
        acceptance_from=run.name,
        assumptions=limits.source,
    )


def model_error(run: Run, cell: Cell, measured: float, limits: Limits) -> Error:
    """Hold the model against a measured cell, ``measured`` tokens a second."""
    tokens = run.settings.tokens
    bare = Limits(limits.flops, limits.bandwidth, 0.0, limits.source)
    return Error(
        run=run.name,
        device=run.environment.device.name,
        strategy=cell.strategy.name,
        batch=cell.batch,
        temperature=cell.temperature,
        measured_tokens_per_second=measured,
        projected_tokens_per_second=projected_rate(cell, tokens, limits)[0],
        ceiling_tokens_per_second=projected_rate(cell, tokens, bare)[0],
        limits=limits.source,
    )


def refuse_projected(entries: Sequence[object]) -> None:
    """Raise ProjectionError where one of the entries was not measured."""
    for entry in entries:
        if getattr(entry, "measured", None) is not True:
            name = getattr(entry, "device", type(entry).__name__)
            raise ProjectionError(
                f"{name!r} is projected, not measured, and cannot stand in a ranking; show it in the "
                "table of projections"
            )
