"""Running the checks: one table, one JSON, one JUnit file for every backend."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from lantern_accel.backend import Backend
from lantern_accel.errors import BackendError, did_you_mean
from lantern_accel.testing import numeric, static
from lantern_accel.testing.result import Failed, Measured, NotApplicable

Check = Callable[[Backend], Measured]

#: Every check by name; the part before the dot is its group.
CHECKS: dict[str, Check] = {**static.CHECKS, **numeric.CHECKS}


class Outcome(BaseModel):
    """What one check found."""

    model_config = ConfigDict(extra="forbid")

    name: str
    state: Literal["passed", "failed", "not applicable"]
    detail: str = ""
    error: float | None = Field(None, description="largest error, in the unit of the tolerance")
    tolerance: float | None = None
    seconds: float = 0.0


class Report(BaseModel):
    """All outcomes for one backend."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    backend: str
    backend_version: str
    device: str
    device_name: str
    torch: str
    outcomes: list[Outcome]

    @property
    def passed(self) -> bool:
        """True where nothing failed."""
        return all(o.state != "failed" for o in self.outcomes)

    def table(self) -> str:
        """Return one line a check, and a line that counts."""
        lines = []
        for o in self.outcomes:
            figure = (
                "" if o.error is None else f" error {o.error:.2g} (tolerance {o.tolerance:.2g})"
            )
            lines.append(f"{o.state:14} {o.name:28}{figure} {o.detail}".rstrip())
        states = [o.state for o in self.outcomes]
        lines.append(
            f"{self.backend} {self.backend_version} on {self.device_name}: "
            f"{states.count('passed')} passed, {states.count('failed')} failed, "
            f"{states.count('not applicable')} not applicable"
        )
        return "\n".join(lines)

    def junit(self) -> bytes:
        """Return the report as JUnit XML."""
        suite = ET.Element(
            "testsuite",
            name=f"lantern_accel.{self.backend}",
            tests=str(len(self.outcomes)),
            failures=str(sum(o.state == "failed" for o in self.outcomes)),
            skipped=str(sum(o.state == "not applicable" for o in self.outcomes)),
        )
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


def select(only: str | Sequence[str] | None) -> dict[str, Check]:
    """Return the checks of the named groups (``static``) or names (``static.host_read``)."""
    if not only:
        return dict(CHECKS)
    names = [only] if isinstance(only, str) else list(only)
    groups = {name.partition(".")[0] for name in CHECKS}
    chosen: dict[str, Check] = {}
    for name in names:
        found = {k: v for k, v in CHECKS.items() if name in (k, k.partition(".")[0])}
        if not found:
            raise BackendError(
                f"no check is named {name!r}{did_you_mean(name, groups | set(CHECKS))}"
            )
        chosen.update(found)
    return chosen


def run_checks(
    backend: Backend,
    checks: Mapping[str, Check] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run checks on an opened backend; a check that raises has failed, the others still run."""
    outcomes = []
    for name, check in (CHECKS if checks is None else checks).items():
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                found = check(backend)
            values: dict[str, Any] = {"state": "passed", **vars(found)}
        except NotApplicable as reason:
            values = {"state": "not applicable", "detail": str(reason)}
        except Failed as failure:
            values = {"state": "failed", "detail": str(failure), **failure.figures}
        except Exception as error:
            values = {"state": "failed", "detail": f"{type(error).__name__}: {error}"}
        outcome = Outcome(name=name, seconds=time.perf_counter() - began, **values)
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    facts = backend.facts()
    return Report(
        backend=backend.name,
        backend_version=backend.version,
        device=str(backend.device),
        device_name=facts.name,
        torch=torch.__version__,
        outcomes=outcomes,
    )


def conform(
    device: str,
    *,
    only: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    json: Path | None = None,
    junit: Path | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Open a device, run the checks, write the reports that are asked for."""
    from lantern_accel.files import write_json, write_whole
    from lantern_accel.plugins import open_backend

    checks = select(only)
    with open_backend(device, options) as backend:
        report = run_checks(backend, checks, on_outcome)
    if json is not None:
        write_json(json, report.model_dump(mode="json"))
    if junit is not None:
        write_whole(junit, lambda stream: stream.write(report.junit()))
    return report
