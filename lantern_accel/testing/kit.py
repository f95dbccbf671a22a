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
from lantern_accel.errors import DeviceRequestError, did_you_mean
from lantern_accel.families.registry import families
from lantern_accel.testing import buckets, buffers, caches, device, drawing, numeric, static
from lantern_accel.testing.result import (
    Failed,
    Measured,
    NeedsCard,
    NotApplicable,
    doing,
    doing_now,
)
from lantern_accel.testing.watch import TimeLimit, Wait, Watch

if TYPE_CHECKING:
    from lantern_accel.device.plugins import Chosen

Check = Callable[[Backend], Measured]

#: Every check by name; the part before the dot is its group.
CHECKS: dict[str, Check] = {
    **static.CHECKS,
    **buffers.CHECKS,
    **caches.CHECKS,
    **numeric.CHECKS,
    **drawing.CHECKS,
    **buckets.CHECKS,
    **device.CHECKS,
}


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
            raise DeviceRequestError(
                f"no check is named {name!r}{did_you_mean(name, groups | set(known))}"
            )
        chosen.update(found)
    return chosen


def run_check(
    backend: Backend,
    name: str,
    check: Check,
    *,
    limit: float | None = None,
    on_wait: Wait | None = None,
) -> Outcome:
    """Run one check on an opened backend; one that raises, or takes ``limit`` seconds, has failed.

    ``on_wait`` is told every few seconds what a check that takes long does.
    """
    began = time.perf_counter()
    doing("")
    try:
        if backend.device.type == "meta" and not name.startswith("static."):
            raise NotApplicable("the backend has shapes and no data")
        with Watch(name, limit, on_wait), backend.inference():
            found = check(backend)
        values: dict[str, Any] = {"state": "passed", **vars(found)}
    except NotApplicable as reason:
        needs = isinstance(reason, NeedsCard)
        values = {"state": "not applicable", "detail": str(reason), "needs_card": needs}
    except Failed as failure:
        values = {"state": "failed", "detail": str(failure), **failure.figures}
    except TimeLimit:
        values = {"state": "failed", "detail": f"took longer than its limit, {limit:g} s{_at()}"}
    except Exception as error:
        values = {"state": "failed", "detail": f"{type(error).__name__}: {error}{_at()}"}
    return Outcome(name=name, seconds=time.perf_counter() - began, **values)


def _at() -> str:
    return f" ({doing_now()})" if doing_now() else ""


def run_checks(
    backend: Backend,
    checks: Mapping[str, Check] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    *,
    limit: float | None = None,
    on_wait: Wait | None = None,
) -> Report:
    """Run checks on an opened backend; a check that raises has failed, the others still run.

    ``limit`` and ``on_wait``: as for :func:`run_check`.
    """
    outcomes = []
    for name, check in (checks_of(backend) if checks is None else checks).items():
        outcome = run_check(backend, name, check, limit=limit, on_wait=on_wait)
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
        families=[kind.name for kind in families()],
        outcomes=outcomes,
    )


def conform(
    device: str | Chosen,
    *,
    only: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    json: Path | None = None,
    junit: Path | None = None,
    certificate: Path | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    limit: float | None = None,
    on_wait: Wait | None = None,
) -> Report:
    """Open a device, run the checks, write the reports that are asked for.

    ``device``: a name with ``options`` for the backend, or what
    :func:`~lantern_accel.device.plugins.choose_device` found. ``limit`` and ``on_wait``: as for
    :func:`run_check`. ``certificate``: a Markdown file, with the same as JSON next to it
    (:mod:`lantern_accel.testing.certificate`). Raises :class:`RequestError` before any check runs where
    a file could not be written.
    """
    from lantern_accel.device.plugins import choose_device
    from lantern_accel.files import check_targets, write_json, write_whole

    check_targets(json, junit, certificate=certificate)
    chosen = choose_device(device, options) if isinstance(device, str) else device
    with chosen.open() as backend:
        known = checks_of(backend)
        chosen_checks = select(only, known)
        before = backend.counters()
        report = run_checks(backend, chosen_checks, on_outcome, limit=limit, on_wait=on_wait)
        if certificate is not None:
            from lantern_accel.testing.certificate import certify, write

            card = certify(
                backend,
                report,
                list(known),
                spec=chosen.spec,
                options=chosen.options,
                counters_before=before,
            )
            write(card, certificate)
    if json is not None:
        write_json(json, report.model_dump(mode="json"))
    if junit is not None:
        write_whole(junit, lambda stream: stream.write(report.junit()))
    return report
