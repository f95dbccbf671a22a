"""Holds what checking a backend found, for reports, which never import the checks themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from lantern_accel.errors import RequestError
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

    schema_version: Literal[1] = 1
    backend: str
    backend_version: str
    device: str
    device_name: str
    simulated: bool = False
    torch: str
    families: list[str] = Field(default_factory=list, description="whose tiny models were run")
    outcomes: list[Outcome]
    not_run: list[str] = Field(
        default_factory=list, description="checks that were asked for when the run was stopped"
    )

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
        waiting += f", {len(self.not_run)} not run" if self.not_run else ""
        failed = f"{states.count('failed')} failed"
        causes = {o.cause or o.name for o in self.outcomes if o.state == "failed"}
        if len(causes) < states.count("failed"):
            failed += f" by {len(causes)} cause{'s' * (len(causes) > 1)}"
        return (
            f"{self.backend} {self.backend_version} on {self.device_name}: "
            f"{states.count('passed')} passed, {failed}, "
            f"{states.count('not applicable')} not applicable{waiting}"
        )

    def with_outcomes(self, outcomes: Iterable[Outcome], asked: Iterable[str]) -> Report:
        """Return the report of other outcomes; one cause is reported once. ``asked``: names, in order."""
        order = list(asked)
        found = {one.name: one for one in outcomes}
        first: dict[str, str] = {}
        told = []
        for name in (one for one in order if one in found):
            one = found[name]
            if one.cause and first.setdefault(one.cause, name) != name:
                one = one.model_copy(update={"detail": f"the same as {first[one.cause]}"})
            told.append(one)
        left = [name for name in order if name not in found]
        return self.model_copy(update={"outcomes": told, "not_run": left})

    def table(self) -> str:
        """Return one line a check, and a line that counts."""
        lines = []
        for o in self.outcomes:
            figure = (
                "" if o.error is None else f" error {o.error:.2g} (tolerance {o.tolerance:.2g})"
            )
            lines.append(f"{o.state:14} {o.name:28}{figure} {o.detail}".rstrip())
        return "\n".join([*lines, self.summary()])


#: A check that takes this many times as long, and at least this many seconds more, has become slower.
SLOWER, SECONDS = 1.5, 1.0


class Difference(Record):
    """What changed between two reports of one backend: lines such as ``kv.write: passed -> failed``."""

    kind: Literal["lantern_accel.conform_diff"] = "lantern_accel.conform_diff"
    schema_version: Literal[1] = 1
    versions: list[str] = Field(description="of backend, torch and device, where they differ")
    broke: list[str] = Field([], description="fails, and did not fail before")
    mended: list[str] = Field([], description="failed before, and passes")
    slower: list[str] = Field([], description="passes as before, in much more time")
    lost: list[str] = Field([], description="passed before, and was not run or does not apply")

    def lines(self) -> list[str]:
        """Return one line a change, and a line that counts."""
        kinds = self.model_dump(include={"broke", "mended", "slower", "lost"})
        told = [f"{kind}: {one}" for kind, every in kinds.items() for one in every]
        counts = ", ".join(f"{len(every)} {kind}" for kind, every in kinds.items())
        return [*self.versions, *told, counts]


def difference(old: Report, new: Report) -> Difference:
    """Compare two reports of one backend; raises RequestError for reports of two."""
    if old.backend != new.backend:
        raise RequestError(
            f"the reports are of two backends, {old.backend} and {new.backend}; `lantern-accel "
            "compare` shows different devices next to each other"
        )
    names = ("backend_version", "torch", "device_name", "simulated")
    a, b = dict(old), dict(new)
    changed = [f"{name}: {a[name]} -> {b[name]}" for name in names if a[name] != b[name]]
    found = Difference(versions=changed)
    before, after = ({one.name: one for one in report.outcomes} for report in (old, new))
    for name in [*after, *(name for name in before if name not in after)]:
        was, now = before.get(name), after.get(name)
        states = was and was.state, now and now.state
        told = f"{name}: {_describe(was)} -> {_describe(now)}"
        if states[1] == "failed" != states[0]:
            found.broke.append(told)
        elif states == ("failed", "passed"):
            found.mended.append(told)
        elif states[0] == "passed" and states[1] not in ("passed", "failed"):
            found.lost.append(told)
        elif states != ("passed", "passed") or was is None or now is None:
            continue
        elif now.seconds > max(SLOWER * was.seconds, was.seconds + SECONDS):
            found.slower.append(f"{name}: {was.seconds:.1f} s -> {now.seconds:.1f} s")
    return found


def _describe(one: Outcome | None) -> str:
    if one is None:
        return "not run"
    return one.state if one.state == "passed" or not one.detail else f"{one.state}, {one.detail}"
