"""Running the checks: one table, one JSON, one JUnit file for every backend."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from lantern_accel.device.backend import Backend
from lantern_accel.errors import BackendError, did_you_mean
from lantern_accel.families.registry import families
from lantern_accel.testing import device, numeric, static
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
CHECKS: dict[str, Check] = {**static.CHECKS, **numeric.CHECKS, **device.CHECKS}


class Outcome(BaseModel):
    """What one check found."""

    model_config = ConfigDict(extra="forbid")

    name: str
    state: Literal["passed", "failed", "not applicable"]
    detail: str = ""
    needs_card: bool = Field(False, description="a simulated device cannot answer this check")
    error: float | None = Field(None, description="largest error, in the unit of the tolerance")
    tolerance: float | None = None
    seconds: float = 0.0


class Report(BaseModel):
    """All outcomes for one backend; ``simulated`` where it stands for another device in software."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    backend: str
    backend_version: str
    device: str
    device_name: str
    simulated: bool = False
    torch: str
    families: list[str] = Field(default_factory=list, description="whose tiny models were run")
    outcomes: list[Outcome]

    @property
    def passed(self) -> bool:
        """True where nothing failed."""
        return all(o.state != "failed" for o in self.outcomes)

    @property
    def needs_card(self) -> int:
        """Checks that wait for a real device."""
        return sum(o.needs_card for o in self.outcomes)

    def summary(self) -> str:
        """Return one line that counts."""
        states = [o.state for o in self.outcomes]
        waiting = f" ({self.needs_card} need a card)" if self.needs_card else ""
        return (
            f"{self.backend} {self.backend_version} on {self.device_name}: "
            f"{states.count('passed')} passed, {states.count('failed')} failed, "
            f"{states.count('not applicable')} not applicable{waiting}"
        )

    def table(self) -> str:
        """Return one line a check, and a line that counts."""
        lines = []
        for o in self.outcomes:
            figure = (
                "" if o.error is None else f" error {o.error:.2g} (tolerance {o.tolerance:.2g})"
            )
            lines.append(f"{o.state:14} {o.name:28}{figure} {o.detail}".rstrip())
        return "\n".join([*lines, self.summary()])

    def junit(self) -> bytes:
        """Return the report as JUnit XML."""
        suite = ET.Element(
            "testsuite",
            name=f"lantern_accel.{self.backend}",
            tests=str(len(self.outcomes)),
            failures=str(sum(o.state == "failed" for o in self.outcomes)),
            skipped=str(sum(o.state == "not applicable" for o in self.outcomes)),
        )
        properties = ET.SubElement(suite, "properties")
        for key in ("device_name", "simulated", "needs_card", "torch"):
            ET.SubElement(properties, "property", name=key, value=str(getattr(self, key)))
        for o in self.outcomes:
            group, _, name = o.name.partition(".")
            case = ET.SubElement(
                suite, "testcase", classname=group, name=name, time=f"{o.seconds:.3f}"
            )
            if o.state == "failed":
                ET.SubElement(case, "failure", message=o.detail)
            elif o.state == "not applicable":
                ET.SubElement(case, "skipped", message=o.detail)
        whole: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
        return whole


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
    on_outcome: Callable[[Outcome], None] | None = None,
    limit: float | None = None,
    on_wait: Wait | None = None,
) -> Report:
    """Open a device, run the checks, write the reports that are asked for.

    ``device``: a name with ``options`` for the backend, or what
    :func:`~lantern_accel.device.plugins.choose_device` found. ``limit`` and ``on_wait``: as for
    :func:`run_check`.
    """
    from lantern_accel.device.plugins import choose_device
    from lantern_accel.files import write_json, write_whole

    chosen = choose_device(device, options) if isinstance(device, str) else device
    with chosen.open() as backend:
        chosen_checks = select(only, checks_of(backend))
        report = run_checks(backend, chosen_checks, on_outcome, limit=limit, on_wait=on_wait)
    if json is not None:
        write_json(json, report.model_dump(mode="json"))
    if junit is not None:
        write_whole(junit, lambda stream: stream.write(report.junit()))
    return report
