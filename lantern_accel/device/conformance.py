"""Holds what checking a backend found, for reports, which never import the checks themselves."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Literal

from pydantic import Field

from lantern_accel.records import Record


class Outcome(Record):
    """What one check found."""

    name: str
    state: Literal["passed", "failed", "not applicable"]
    detail: str = ""
    needs_card: bool = Field(False, description="a simulated device cannot answer this check")
    error: float | None = Field(None, description="largest error, in the unit of the tolerance")
    tolerance: float | None = None
    cause: str | None = Field(
        None,
        description="the exception that ended it and the line it came from; the same: one cause",
    )
    seconds: float = 0.0


class Report(Record):
    """All outcomes for one backend; ``simulated`` where it stands for another device in software."""

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
        failed = f"{states.count('failed')} failed"
        causes = {o.cause or o.name for o in self.outcomes if o.state == "failed"}
        if len(causes) < states.count("failed"):
            failed += f" by {len(causes)} cause{'s' * (len(causes) > 1)}"
        return (
            f"{self.backend} {self.backend_version} on {self.device_name}: "
            f"{states.count('passed')} passed, {failed}, "
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
