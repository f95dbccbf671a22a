"""Running the checks: one table, one JSON, one JUnit file for every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.device.conformance import Outcome as Outcome
from lantern_accel.device.conformance import Report as Report
from lantern_accel.errors import BackendError, did_you_mean
from lantern_accel.testing import device, numeric, static
from lantern_accel.testing.result import Failed, Measured, NeedsCard, NotApplicable

if TYPE_CHECKING:
    from lantern_accel.device.plugins import Chosen

Check = Callable[[Backend], Measured]

#: Every check by name; the part before the dot is its group.
CHECKS: dict[str, Check] = {**static.CHECKS, **numeric.CHECKS, **device.CHECKS}


def checks_of(backend: Backend) -> dict[str, Check]:
    """Return the checks for a backend: everybody's, then its own."""
    return {**CHECKS, **backend.checks()}


def select(
    only: str | Sequence[str] | None, checks: Mapping[str, Check] | None = None
) -> dict[str, Check]:
    """Return the checks of the named groups (``static``) or names (``static.host_read``)."""
    known = dict(CHECKS if checks is None else checks)
    if not only:
        return known
    names = [only] if isinstance(only, str) else list(only)
    groups = {name.partition(".")[0] for name in known}
    chosen: dict[str, Check] = {}
    for name in names:
        found = {k: v for k, v in known.items() if name in (k, k.partition(".")[0])}
        if not found:
            raise BackendError(
                f"no check is named {name!r}{did_you_mean(name, groups | set(known))}"
            )
        chosen.update(found)
    return chosen


def run_check(backend: Backend, name: str, check: Check) -> Outcome:
    """Run one check on an opened backend; one that raises has failed."""
    began = time.perf_counter()
    try:
        if backend.device.type == "meta" and not name.startswith("static."):
            raise NotApplicable("the backend has shapes and no data")
        with torch.inference_mode():
            found = check(backend)
        values: dict[str, Any] = {"state": "passed", **vars(found)}
    except NotApplicable as reason:
        needs = isinstance(reason, NeedsCard)
        values = {"state": "not applicable", "detail": str(reason), "needs_card": needs}
    except Failed as failure:
        values = {"state": "failed", "detail": str(failure), **failure.figures}
    except Exception as error:
        values = {"state": "failed", "detail": f"{type(error).__name__}: {error}"}
    return Outcome(name=name, seconds=time.perf_counter() - began, **values)


def run_checks(
    backend: Backend,
    checks: Mapping[str, Check] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run checks on an opened backend; a check that raises has failed, the others still run."""
    outcomes = []
    for name, check in (checks_of(backend) if checks is None else checks).items():
        outcome = run_check(backend, name, check)
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    facts = backend.facts()
    return Report(
        backend=backend.name,
        backend_version=backend.version,
        device=str(backend.device),
        device_name=facts.name,
        simulated=backend.simulated,
        torch=torch.__version__,
        outcomes=outcomes,
    )


def conform(
    device: str | Chosen,
    *,
    only: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    json: Path | None = None,
    junit: Path | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Open a device, run the checks, write the reports that are asked for.

    ``device``: a name with ``options`` for the backend, or what
    :func:`~lantern_accel.device.plugins.choose_device` found.
    """
    from lantern_accel.device.plugins import choose_device
    from lantern_accel.files import write_json, write_whole

    chosen = choose_device(device, options) if isinstance(device, str) else device
    with chosen.open() as backend:
        report = run_checks(backend, select(only, checks_of(backend)), on_outcome)
    if json is not None:
        write_json(json, report.model_dump(mode="json"))
    if junit is not None:
        write_whole(junit, lambda stream: stream.write(report.junit()))
    return report
