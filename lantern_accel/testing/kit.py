"""Running the checks: one table, one JSON, one JUnit file for every backend."""

from __future__ import annotations

import difflib
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lantern_accel.device.backend import Backend, Conformance
from lantern_accel.device.conformance import Outcome as Outcome
from lantern_accel.device.conformance import Report as Report
from lantern_accel.device.context import inference
from lantern_accel.device.plugins import ask, choose_device
from lantern_accel.device.waiting import repeating
from lantern_accel.errors import DeviceRequestError, LanternWarning, did_you_mean
from lantern_accel.families.registry import families
from lantern_accel.files import check_targets, write_json
from lantern_accel.testing import (
    attention,
    caches,
    couplings,
    device,
    host,
    noise,
    numeric,
    operations,
    replay,
    rotation,
    static,
    trunks,
)
from lantern_accel.testing.certificate import certify, write
from lantern_accel.testing.result import (
    Failed,
    Measured,
    NeedsCard,
    NotApplicable,
    doing,
    doing_now,
)
from lantern_accel.testing.trace import source_line

if TYPE_CHECKING:
    from lantern_accel.device.plugins import Chosen

Check = Callable[[Backend], Measured]

#: Every check by name; the part before the dot is its group.
CHECKS: dict[str, Check] = {
    "static.host_read": static.rule("host_read", "no host read"),
    "static.dynamic_shape": static.rule("dynamic_shape", "no data-dependent shape"),
    "static.float64": static.rule("float64", "no float64"),
    "static.other_device": static.rule("other_device", "no tensor of another device"),
    "static.device_generator": static.rule("device_generator", "no device generator"),
    "static.operators": static.rule("operators", "only operators that the backend lists"),
    "static.dtypes": static.rule("dtypes", "only dtypes that the backend's kernels take"),
    "static.indices": static.rule("indices", "no integers wider than the device's indices"),
    "static.one_graph": static.one_graph,
    "static.kernels": static.kernels,
    "static.views": static.views,
    "static.buffers": static.buffers,
    "kv.separate": caches.separate,
    "kv.round_trip": caches.round_trip,
    "kv.sentinels": caches.sentinels,
    "kv.slots": caches.slots,
    "kv.addresses": caches.addresses,
    "operation.linear": operations.linear,
    "operation.logits": operations.logits,
    "operation.fewer_bits": operations.fewer_bits,
    "operation.rms_norm": operations.rms_norm,
    "operation.swiglu": operations.swiglu,
    "operation.rotate": rotation.rotate,
    "operation.rotate_write": rotation.rotate_write,
    "operation.put": operations.put,
    "attention.float64": attention.cached_attention,
    "attention.dense": attention.dense,
    "attention.trunk": trunks.trunk,
    "accept.ties": numeric.ties,
    "accept.decisions": numeric.decisions,
    "accept.invariant": couplings.invariant,
    "accept.window": couplings.window,
    "draw.scan": numeric.scan,
    "draw.filter": numeric.filters,
    "draw.guidance": numeric.guidance,
    "draw.codes": numeric.samples,
    "draw.likeliest": couplings.likeliest,
    "draw.noise": noise.noise,
    "draw.race": noise.race,
    "decode.cpu": host.cpu,
    "decode.drawn": host.host_requests,
    "decode.greedy": numeric.like_vanilla("give", temperature=0.0, others=()),
    "decode.seeds": numeric.like_vanilla("draw", temperature=1.0, others=("eagle2", "scd")),
    "decode.allowed": numeric.forced_codes,
    "decode.distribution": numeric.distribution,
    "decode.interrupted": numeric.cancelled_requests,
    "decode.weights_from_outside": numeric.weights_from_outside,
    "replay.eager": replay.eager,
    "replay.buckets": replay.buckets,
    "replay.kind": replay.kind,
    "replay.stable": replay.stable,
    "device.stopwatch": device.stopwatch,
    "device.memory": device.memory,
    "device.energy": device.energy,
}


#: Gets the check's name, what it does, and the seconds that it has taken.
Wait = Callable[[str, str, float], None]
#: Seconds between two words about a check that takes long.
EVERY = 10.0


def checks_of(backend: Backend) -> dict[str, Check]:
    """Return the checks for a backend: everybody's, then its own."""
    more = ask(backend.name, "conformance", backend.conformance, Conformance)
    return {**CHECKS, **more.checks}


def select(
    only: str | Sequence[str] | None, checks: Mapping[str, Check] | None = None
) -> dict[str, Check]:
    """Return the checks of groups (``static``; ``own``: a backend's) or names (``static.host_read``)."""
    known = dict(CHECKS if checks is None else checks)
    if not only:
        return known
    names = [only] if isinstance(only, str) else list(only)
    groups = {name.partition(".")[0] for name in known}
    chosen: dict[str, Check] = {}
    for name in names:
        own = CHECKS if name == "own" else known
        found = {k: v for k, v in known.items() if name in (k, k.partition(".")[0]) or k not in own}
        if not found and name != "own":
            raise DeviceRequestError(
                f"no check is named {name!r}{did_you_mean(name, known if '.' in name else groups)}"
            )
        chosen.update(found)
    return chosen


def run_check(backend: Backend, name: str, check: Check, *, on_wait: Wait | None = None) -> Outcome:
    """Run one check on an opened backend; one that raises has failed.

    ``on_wait`` is called every few seconds with what a check that takes long does.
    """
    began = time.perf_counter()
    doing("")
    try:
        if backend.device.type == "meta" and not name.startswith("static."):
            raise NotApplicable("the backend has shapes and no data")
        watch: AbstractContextManager[None] = nullcontext()
        if on_wait is not None:
            watch = repeating(lambda seconds: on_wait(name, doing_now(), seconds), EVERY)
        with watch, inference(backend):
            found = check(backend)
        values: dict[str, object] = {"state": "passed", **vars(found)}
    except NotApplicable as reason:
        needs = isinstance(reason, NeedsCard)
        values = {"state": "not applicable", "detail": str(reason), "needs_card": needs}
    except Failed as failure:
        values = {"state": "failed", "detail": str(failure), **failure.figures}
    except Exception as error:
        line = source_line(error, _foreign)
        what = f"{type(error).__name__}: {' '.join(str(error).split())}{line and f' ({line})'}"
        at = f" ({doing_now()})" if doing_now() else ""
        values = {"state": "failed", "detail": f"{what}{at}", "cause": what}
    return Outcome(name=name, seconds=time.perf_counter() - began, **values)


def _foreign(filename: str) -> bool:
    """Return whether a file's lines tell a backend's author nothing: torch's, Python's and ours."""
    others = re.search(
        r"/torch/|/contextlib\.py$|^<|/unittest/mock\.py$", filename.replace("\\", "/")
    )
    return others is not None or Path(__file__).parents[1] in Path(filename).parents


def warn_of_near_misses(backend: Backend) -> None:
    """Warn of each method of a backend whose name is nearly one of the backend interface's.

    Such a method is called by nobody, and the reference runs in its place.
    """
    members = {name for name in dir(Backend) if not name.startswith("_")}
    own: dict[str, type] = {}
    for kind in type(backend).__mro__:
        if not kind.__module__.startswith(("lantern_accel.", "builtins", "abc", "typing")):
            own |= {name: kind for name in vars(kind) if not name.startswith("_")}
    for name in sorted(set(own) - members):
        near = difflib.get_close_matches(name, members, n=1, cutoff=0.8)
        if near and near[0] not in vars(own[name]):
            text = f"{own[name].__name__}.{name} is not a method of the backend interface and is called "
            warnings.warn(f"{text}by nobody; did you mean {near[0]}?", LanternWarning, stacklevel=2)


def run_checks(
    backend: Backend,
    checks: Mapping[str, Check] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    *,
    on_wait: Wait | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Run checks on an opened backend; a check that raises has failed, the others still run.

    ``on_wait``: as for :func:`run_check`. ``on_report`` gets the report after every check.
    """
    chosen = checks_of(backend) if checks is None else checks
    report = report_of(backend)
    for name, check in chosen.items():
        outcome = run_check(backend, name, check, on_wait=on_wait)
        report = report.with_outcomes([*report.outcomes, outcome], chosen)
        if on_outcome is not None:
            on_outcome(report.outcomes[-1])
        if on_report is not None:
            on_report(report)
    return report


def report_of(backend: Backend) -> Report:
    """Return the report of a backend on which no check has run."""
    facts = backend.facts()
    return Report(
        backend=backend.name,
        backend_version=backend.version,
        device=str(backend.device),
        device_name=facts.name,
        simulated=backend.simulated,
        torch=torch.__version__,
        families=[kind.name for kind in families()],
        outcomes=[],
    )


def conform(
    device: str | Chosen,
    *,
    only: str | Sequence[str] | None = None,
    options: Mapping[str, object] | None = None,
    json: Path | None = None,
    certificate: Path | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
    on_wait: Wait | None = None,
) -> Report:
    """Open a device, run the checks in this process, write the reports that are asked for.

    Reports are written after every check, so that what ran is kept where the run is stopped. Nothing
    ends a check that hangs; the command's processes do. ``device``: a name with ``options`` for the
    backend, or what :func:`~lantern_accel.device.plugins.choose_device` found. ``on_wait``: as for
    :func:`run_check`. ``certificate``: a Markdown file, with the same as JSON next to it
    (:mod:`lantern_accel.testing.certificate`). Raises :class:`RequestError` before any check runs where
    a file could not be written.
    """
    check_targets(json, certificate=certificate)
    chosen = choose_device(device, options) if isinstance(device, str) else device
    with chosen.open() as backend:
        warn_of_near_misses(backend)
        known = checks_of(backend)
        before = backend.counters()
        report = run_checks(
            backend,
            select(only, known),
            on_outcome,
            on_wait=on_wait,
            on_report=lambda now: write_report(now, json),
        )
        if certificate is not None:
            card = certify(
                backend,
                report,
                list(known),
                spec=chosen.spec,
                options=chosen.options,
                counters=(before, backend.counters()),
            )
            write(card, certificate)
    return report


def write_report(report: Report, json: Path | None) -> None:
    """Write a report as JSON, where a file is named."""
    if json is not None:
        write_json(json, report.model_dump(mode="json"))
