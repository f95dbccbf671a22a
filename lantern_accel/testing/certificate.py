"""A certificate: what was checked on which versions, what passed, and what nobody has shown."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from lantern_accel.device.backend import CAPABILITIES, SEAM, Backend, DeviceFacts
from lantern_accel.device.conformance import Report
from lantern_accel.device.context import inference
from lantern_accel.device.spec import API_VERSION, BackendSpec
from lantern_accel.families.registry import broken_families
from lantern_accel.files import write_json, write_whole
from lantern_accel.records import Record, markdown_table
from lantern_accel.testing.result import is_overridden
from lantern_accel.testing.served import Served, who_serves

#: Who serves an operation is watched in these: no drafts, a tree, relaxed acceptance, and a window.
STRATEGIES = ("vanilla", "eagle2", "lantern++", "scd")

# --- the interface --------------------------------------------------------------------------------

RECOMMENDED = {
    "priority": "0, like the CPU's: `auto` then takes the first by name",
    "compute_dtypes": "float32 only: twice the bytes of bfloat16",
    "support": "capture is answered with no",
    "conformance": "every operator is believed to have a kernel, and yours are not checked",
    "capture": "eager: Python dispatches thousands of operators per step",
    "explain": "the vendor's own error reaches the user",
    "memory": "unknown: a request that does not fit is found out by failing",
    "counters": "none: nothing shows that replay recompiles",
    "close": "nothing is given back",
    "host_copy": "a blocking copy per read: the device waits for the host",
    "attend": "`scaled_dot_product_attention` over the whole cache, empty slots included",
}
"""Members that have a reference, and what it hides or costs; the site's reference lists every member."""

#: What has no reference, and what a backend does not write.
REQUIRED = (
    "name",
    "summary",
    "version",
    "api_version",
    "device",
    "probe",
    "open",
    "facts",
    "synchronize",
)
NOT_OVERRIDDEN = ("listener", "own_steps", "region")


class Member(Record):
    """A member of the backend interface, and whose it is."""

    name: str
    level: Literal["recommended", "optional"]
    written: bool
    reference: str = ""


def members(backend: Backend, spec: BackendSpec | None = None) -> list[Member]:
    """Return every member that has a reference, the recommended ones first."""
    owners: list[tuple[object, type]] = [(backend, kind) for kind in SEAM]
    if spec is not None:
        owners.insert(0, (spec, BackendSpec))
    found = [
        Member(
            name=name,
            level="recommended" if name in RECOMMENDED else "optional",
            written=is_overridden(one, name, kind),
            reference=RECOMMENDED.get(name, ""),
        )
        for one, kind in owners
        for name in sorted({*vars(kind), *vars(kind).get("__annotations__", {})})
        if name[0] != "_" and name not in (*REQUIRED, *NOT_OVERRIDDEN)
    ]
    return sorted(found, key=lambda member: member.level, reverse=True)


# --- the certificate ------------------------------------------------------------------------------


class Certificate(Record):
    """What a run of the kit shows about a backend; ``verdict`` counts the checks that did not run."""

    kind: Literal["lantern_accel.certificate"] = "lantern_accel.certificate"
    schema_version: Literal[1] = 1
    verdict: Literal["conforms", "fails", "incomplete"]
    why: str = Field("", description="what keeps the verdict from being 'conforms'")
    command: str
    made: str = Field(description="UTC")
    seconds: float
    versions: dict[str, str]
    device: DeviceFacts
    options: dict[str, str]
    report: Report
    not_run: list[str] = Field(description="checks that were left out of the run")
    capabilities: dict[str, str] = Field(description="'yes', or why not")
    interface: list[Member]
    served: list[Served] = Field(
        default_factory=list,
        description="empty where the device has no data to run steps on, or hangs",
    )
    counters_before: dict[str, int]
    counters_after: dict[str, int]


def certify(
    backend: Backend,
    report: Report,
    known: list[str],
    *,
    spec: BackendSpec | None = None,
    options: Mapping[str, object] | None = None,
    counters: Sequence[Mapping[str, int]] | None = None,
    command: str = "",
    watch: bool = True,
) -> Certificate:
    """Make the certificate of a backend that is open; ``known``: every check there is for it.

    ``counters``: the backend's before the checks and after; of several processes their sums. ``watch``
    steps for who serves each operation; False: of a backend that hangs.
    """
    before, after = counters or ({}, backend.counters())
    ran = {outcome.name for outcome in report.outcomes}
    not_run = [name for name in known if name not in ran]
    verdict, reason = _verdict(report, not_run)
    with inference(backend):
        able = watch and backend.device.type != "meta"
        served = who_serves(backend, STRATEGIES) if able else []
    return Certificate(
        verdict=verdict,
        why=reason,
        command=command or command_line(),
        made=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        seconds=sum(outcome.seconds for outcome in report.outcomes),
        versions=_versions(backend),
        device=backend.facts(),
        options={name: str(value) for name, value in (options or {}).items()},
        report=report,
        not_run=not_run,
        capabilities=_capabilities(backend),
        interface=members(backend, spec),
        served=served,
        counters_before=dict(before),
        counters_after=dict(after),
    )


def write(certificate: Certificate, path: Path) -> list[Path]:
    """Write Markdown to ``path`` and the same as JSON next to it; return both. ``.json``: JSON alone."""
    beside = path.with_suffix(".json")
    write_json(beside, certificate.model_dump(mode="json"))
    if path == beside:
        return [beside]
    write_whole(path, markdown(certificate))
    return [path, beside]


def _verdict(
    report: Report, not_run: list[str]
) -> tuple[Literal["conforms", "fails", "incomplete"], str]:
    failed = [one.name for one in report.outcomes if one.state == "failed"]
    if failed:
        return "fails", f"failed: {', '.join(failed)}"
    reasons = []
    if not_run:
        reasons.append(f"{len(not_run)} checks were left out")
    if broken := broken_families():
        reasons.append(f"models of a family that does not load were not run: {', '.join(broken)}")
    if report.simulated:
        reasons.append(f"the device is simulated ({report.needs_card} checks need a card)")
    if not any(one.state == "passed" for one in report.outcomes):
        reasons.append("nothing passed")
    return ("incomplete", "; ".join(reasons)) if reasons else ("conforms", "")


def command_line() -> str:
    return shlex.join(["lantern-accel", *sys.argv[1:]] if len(sys.argv) > 1 else sys.argv)


def _versions(backend: Backend) -> dict[str, str]:
    found = {
        "lantern_accel": importlib.metadata.version("lantern-accel"),
        "backend API": str(API_VERSION),
        f"backend {backend.name}": backend.version,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
    }
    facts = backend.facts()
    known = {"driver": facts.driver, "sdk": facts.sdk}
    return found | {name: value for name, value in known.items() if value}


def _capabilities(backend: Backend) -> dict[str, str]:
    found = {}
    for name in CAPABILITIES:
        answer = backend.support(name)
        found[name] = (answer.how or "yes") if answer else f"no: {answer.reason}"
    return found


# --- Markdown ---------------------------------------------------------------------------------------

WORDS = {
    "conforms": "conforms",
    "fails": "does not conform",
    "incomplete": "is not shown to conform",
}


def markdown(card: Certificate) -> str:
    """Return the certificate as a page."""
    report = card.report
    states = [one.state for one in report.outcomes]
    reason = f": {card.why}" if card.why else ""
    facts = [(k, "; ".join(map(str, v)) if isinstance(v, tuple | list) else v)
             for k, v in card.device if v not in (None, ())]  # fmt: skip
    left = [one for one in card.interface if not one.written]
    costs = [(f"`{one.name}`", one.reference) for one in left if one.level == "recommended"]
    rest = ", ".join(f"`{one.name}`" for one in left if one.level == "optional")
    own = ", ".join(f"`{one.name}`" for one in card.interface if one.written)
    rows = [(f"`{one.operation}`", one.by, one.calls, one.to_reference) for one in card.served]
    counts = [(n, card.counters_before.get(n, 0), c) for n, c in card.counters_after.items()]
    lines = [
        f"# {report.backend} on {report.device_name}",
        "",
        f"**The backend {WORDS[card.verdict]}{reason}.** {states.count('passed')} checks passed, "
        f"{states.count('failed')} failed, {states.count('not applicable')} do not apply, "
        f"{len(card.not_run)} were left out.",
        "",
        f"Made {card.made} UTC in {card.seconds:.0f} s by `{card.command}`.",
        "",
        *_table(("version of", ""), card.versions.items()),
        *_table(("device", ""), facts),
        *_table(("option", ""), card.options.items()),
        *(line for state in ("failed", "passed", "not applicable") for line in _outcomes(report, state)),
        "## Left out of this run",
        *([f"- `{name}`" for name in card.not_run] or ["Nothing: every check there is was run."]),
        "",
        "## What the device can do",
        *_table(("capability", "answer"), card.capabilities.items()),
        "## Left to the reference",
        *(_table(("recommended", "the reference"), costs) or ["Nothing recommended.", ""]),
        f"Optional: {rest or 'nothing'}.",
        "",
        f"The backend's own: {own or 'nothing'}.",
        "",
        "## Who served what",
        "Calls of the interface in prefill and eager steps of tiny models, in the best dtype; none where "
        "the device has shapes and no data, or hangs. Native: an override that ran no operator of torch, "
        "so a kernel of the backend's or its vendor's.",
        "",
        *_table(("operation", "served by", "calls", "by the reference"), rows),
        "## Compilations and other counts",
        *(_table(("counter", "before the checks", "after"), counts)
          or ["The backend counts nothing, so nothing shows that a step is never compiled again."]),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return a table's lines; none without a row."""
    listed = list(rows)
    return [*markdown_table(head, listed), ""] if listed else []


def _outcomes(report: Report, state: str) -> list[str]:
    rows = [
        (f"`{one.name}`", one.detail,
         "" if one.error is None else f"{one.error:.2g} ({one.tolerance:.2g})", f"{one.seconds:.1f}")
        for one in report.outcomes
        if one.state == state
    ]  # fmt: skip
    heads = ("check", "what it found", "error (tolerance)", "s")
    return [f"## {state.capitalize()}", *(_table(heads, rows) or ["None.", ""])]
