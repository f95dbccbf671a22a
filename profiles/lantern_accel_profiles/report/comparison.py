"""Puts runs side by side: points, offers, verdicts, and what is missing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from lantern_accel._version import __version__
from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.device.datasheets import DeviceProfile, all_profiles
from lantern_accel_profiles.measure.record import NOT_MEASURED, Run
from lantern_accel_profiles.report.names import differences, readable_names, setup_of
from lantern_accel_profiles.report.offers import offers
from lantern_accel_profiles.report.points import Terms, points_of
from lantern_accel_profiles.report.record import Comparison, Gap, ModelSection, RunSummary
from lantern_accel_profiles.report.rows import row_of, same_rounds
from lantern_accel_profiles.report.verdict import answer, at_setting, equal_quality


def compare(
    runs: Sequence[Run],
    conformance: Sequence[ConformanceReport] = (),
    profiles: Sequence[DeviceProfile] | None = None,
    terms: Terms | None = None,
) -> Comparison:
    """Put runs side by side; :func:`check_comparable` of ``measure.reading`` comes first.

    Amounts of ``terms`` are by a run's recorded name. Names that nobody chose become readable.
    """
    profiles = all_profiles() if profiles is None else profiles
    recorded, found = [run.name for run in runs], [setup_of(run) for run in runs]
    runs = [same_rounds(run) for run in readable_names(runs)]
    named = {old: run.name for old, run in zip(recorded, runs, strict=True)}
    setups = {run.name: one for one, run in zip(found, runs, strict=True)}
    terms = Terms() if terms is None else terms
    terms = terms.model_copy(
        update={
            kind: {named[name]: amount for name, amount in getattr(terms, kind).items()}
            for kind in ("rent", "buy")
        }
    )
    models = list(dict.fromkeys(run.settings.model for run in runs))
    sections = [
        _section([r for r in runs if r.settings.model == model], setups, terms) for model in models
    ]
    checks = [*conformance, *(r.conformance for r in runs if not isinstance(r.conformance, str))]
    return Comparison(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        lantern_accel=__version__,
        runs=[
            RunSummary(
                name=run.name,
                recorded_as=old,
                device=run.environment.device.name,
                **run.model_dump(include={*RunSummary.model_fields} - {"name"}),
            )
            for old, run in zip(recorded, runs, strict=True)
        ],
        terms=terms,
        models=sections,
        conformance=checks,
        gaps=[*_device_gaps(runs, profiles), *_figure_gaps(runs, sections, conformance)],
    )


def _section(
    runs: Sequence[Run], setups: Mapping[str, tuple[object, ...]], terms: Terms
) -> ModelSection:
    settings = runs[0].settings
    rows = [row_of(run, cell) for run in runs for cell in run.cells if cell.samples]
    points, seconds = points_of(runs, rows, terms)
    offered = offers(runs, setups, points, seconds, terms)
    # Every section has the devices in the order of the offers.
    names = [[one.run for one in offered], [one.run for one in points], [one.run for one in rows]]
    order = list(dict.fromkeys(itertools.chain(*names)))
    runs = sorted((r for r in runs if r.name in order), key=lambda run: order.index(run.name))
    rows.sort(key=lambda row: order.index(row.run))
    return ModelSection(
        model=settings.model,
        weights_hash=settings.weights_hash,
        tokens=settings.tokens,
        offers=offered,
        points=points,
        answers=[answer(here) for run in runs if (here := at_setting(rows, run.name))],
        differences=differences(runs) if len(runs) > 1 else {},
        equal_quality=equal_quality(runs, rows, terms.tv_budget),
        rows=rows,
        contact_sheet={run.name: run.contact_sheet for run in runs if run.contact_sheet},
    )


# --- what is missing --------------------------------------------------------------------------


def _device_gaps(runs: Sequence[Run], profiles: Sequence[DeviceProfile]) -> Iterator[Gap]:
    devices = [run.environment.device for run in runs]
    for profile in profiles:
        if any(profile.matches(one.backend, one.name) for one in devices):
            continue
        for model in dict.fromkeys(run.settings.model for run in runs):
            yield Gap(
                where=f"{profile.vendor} {profile.model}",
                what=["every figure"],
                reason="no run is among the files",
                command=f"lantern-accel profile --device {profile.backend} --model {model} "
                f"-o {profile.name}.json",
                device=True,
            )


def _figure_gaps(
    runs: Sequence[Run], sections: Sequence[ModelSection], conformance: Sequence[ConformanceReport]
) -> Iterator[Gap]:
    """Collect every 'not measured' of runs and rows, once a reason."""
    checked = {(r.backend, r.device_name) for r in conformance if not r.simulated}
    rows = [row for section in sections for row in section.rows]
    for run in runs:
        device = run.environment.device
        known = {"conformance"} if (device.backend, device.name) in checked else set()
        raw = {"contact_sheet", "cells", "steps", "loads"}
        parts = [run.model_dump(exclude=raw | known)]
        parts += [cell.model_dump(exclude={"warmup", "samples"}) for cell in run.cells]
        parts += [r.model_dump(exclude={"verdict", "quality"}) for r in rows if r.run == run.name]
        found: dict[str, set[str]] = {}
        for field, reason in _find_missing(parts, ""):
            found.setdefault(reason, set()).add(field)
        for reason, fields in found.items():
            command = re.search(r"`([^`]+)`", reason)
            yield Gap(
                where=run.name,
                what=sorted(fields),
                reason=reason,
                command=_command(run, command[1] if command else ""),
            )


def _command(run: Run, named: str) -> str:
    """Return what fills a gap: a command as it is, or an option added to the run's own."""
    resumed = f"{run.command} --resume"
    if named.startswith("--"):
        return f"{run.command} {named} --resume"
    if named.startswith("pip "):
        return f"{named} && {resumed}"
    return named or ("" if run.state == "complete" else resumed)


def _find_missing(part: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of every figure that is not there."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _find_missing(value, key)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _find_missing(value, name)
    elif isinstance(part, str) and part.startswith(NOT_MEASURED):
        yield name, part.removeprefix(NOT_MEASURED)
