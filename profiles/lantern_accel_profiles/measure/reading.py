"""Taking runs back: read whole and checked against themselves; and which of them may be compared.

A stopwatch that did not wait for the device shows in the samples: such a file is refused.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.errors import RequestError
from lantern_accel.store import read_json, validate_file
from lantern_accel_profiles.measure.record import Cell, LoadCell, Run, is_measured
from lantern_accel_profiles.store import from_data

#: Stopwatch over host clock, summed over the samples of a cell: outside, the stopwatch is wrong.
CLOCK_RATIO = (0.8, 1.05)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
CORRECT = "correct the backend's stopwatch()"
#: Host seconds per request that the stopwatch rightly leaves out (checking, making images).
CLOCK_SLACK = 0.02


def read_file(path: Path) -> Run | ConformanceReport:
    """Read a run or a conformance report; raises RequestError."""
    data = read_json(path)
    if {"outcomes", "backend_version"} <= data.keys():
        return validate_file(ConformanceReport, path, data)
    if data.get("kind") == "lantern_accel.comparison":
        raise RequestError(
            f"{path} is a report of `lantern-accel compare`; name the runs that it was made from"
        )
    run = from_data(path, Run, data)
    faults = [(c.name, counts_fault(c, run.settings.tokens) or clock_fault(c)) for c in run.cells]
    faults += [(f"{one.clients} requests at once", load_fault(one)) for one in run.loads]
    for one in filter(CONTROL.search, (run.name, run.settings.model, run.environment.device.name)):
        raise RequestError(f"{path} is refused: {one!r} has a control character; take it out")
    for where, fault in faults:
        if fault:
            raise RequestError(f"{path} is refused: {where}: {fault}; measure it again")
    return run


def read_run(path: Path) -> Run:
    """Read one run; raises RequestError for anything else."""
    found = read_file(path)
    if not isinstance(found, Run):
        raise RequestError(f"{path} is a conformance report, not a run; name a run")
    return found


def counts_fault(cell: Cell, tokens: int) -> str:
    """Say which counts of a cell's samples contradict it; empty where none does.

    An image has ``tokens`` tokens: the first one by prefill, then one a step, or more where it drafts.
    """
    images, most = cell.batch, cell.batch * (tokens - 1)
    least = most if cell.strategy.drafts.size[0] == 1 else 1
    for s in cell.samples:
        if (s.images, s.tokens) != (images, images * tokens) or not least <= s.steps <= most:
            return (
                f"a sample has {s.images} images, {s.tokens} tokens and {s.steps} steps, where {images} "
                f"images of {tokens} tokens take {images * tokens} tokens and {least} to {most} steps"
            )
    return ""


def clock_fault(cell: Cell) -> str:
    """Say how a cell's stopwatch contradicts the host's clock; empty where it does not.

    A request ends with its images on the host, so that both clocks see the same work. A stopwatch
    that does not wait for the device sees only the launches, in every sample: on a busy machine either
    clock may stand still between the two readings of one.
    """
    pairs = [
        (s.total, s.wall) for s in cell.samples if is_measured(s.total) and is_measured(s.wall)
    ]
    if not pairs:
        return ""
    watch, wall = (statistics.median(column) for column in zip(*pairs, strict=True))
    parts = statistics.median(s.prefill + s.decode for s in cell.samples)
    low, high = CLOCK_RATIO
    if all(a < low * b - CLOCK_SLACK for a, b in pairs) or all(
        a > high * b + CLOCK_SLACK for a, b in pairs
    ):
        return (
            f"the stopwatch reads {watch:.4f} s where the host's clock saw {wall:.4f} s; it does not "
            f"wait for the device, so no speed can be taken from it; {CORRECT}"
        )
    if parts > high * watch + CLOCK_SLACK:
        return (
            f"decoding took {parts:.4f} s of a request of {watch:.4f} s; the parts exceed the whole; "
            + CORRECT
        )
    return ""


def load_fault(cell: LoadCell) -> str:
    """Say how the client's clock contradicts itself or the service's; empty where it does not.

    A service's seconds by stage are parts of what its client waited for. One request in twenty may be out
    of line, as where a machine was stopped.
    """
    if any(one.ended < one.began for one in cell.samples) or cell.ended <= cell.began:
        return "its clock ran backwards"
    high = CLOCK_RATIO[1]
    known = [one for one in cell.samples if one.outcome == "ok"]
    spent = [sum(s.stages.values()) if isinstance(s.stages, dict) else 0.0 for s in known]
    over = [a > high * s.seconds + CLOCK_SLACK for a, s in zip(spent, known, strict=True)]
    if sum(over) > len(known) / 20:
        return f"{sum(over)} of {len(known)} requests took the service longer than their clients waited"
    return ""


# --- what may be compared ---------------------------------------------------------------------


def check_comparable(runs: Sequence[Run], origins: Sequence[str]) -> None:
    """Raise RequestError where runs share a name or are of different things, or one has no request.

    Runs of different models may stand in one report (never in one comparison); runs of one model must
    agree in weights, tokens, sampling, prompts, protocol, and in each strategy's acceptance rule.
    """
    seen: dict[str, str] = {}
    for run, origin in zip(runs, origins, strict=True):
        if run.name in seen:
            raise RequestError(
                f"two runs are named {run.name!r}: {seen[run.name]} and {origin}; leave one out, or "
                f"give it another name as NAME={origin}"
            )
        seen[run.name] = origin
        if run.steps and not run.cells:
            raise RequestError(
                f"{origin} has steps alone, of random weights, and no request to compare; "
                f"`{run.command}` prints its table"
            )
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.settings.model, run)
        mine, theirs = _key_properties(run), _key_properties(other)
        for key in sorted(mine.keys() & theirs.keys()):
            if mine[key] != theirs[key]:
                raise RequestError(
                    f"{run.name!r} and {other.name!r} cannot be compared: {key} is {mine[key]!r} in "
                    f"one and {theirs[key]!r} in the other; measure one of them again"
                )


def _key_properties(run: Run) -> dict[str, object]:
    """Return what runs of one model must share, by the name a message gives it."""
    settings = run.settings
    found: dict[str, object] = {
        "protocol version": run.protocol_version,
        "model hash": settings.weights_hash,
        "tokens per image": settings.tokens,
        "prompts": settings.prompts.sha256[:12],
    }
    # Cells name their temperature.
    sampling = settings.sampling.model_dump(exclude={"temperature"})
    found |= {f"sampling {field}": value for field, value in sampling.items()}
    for cell in run.cells:
        own = cell.strategy.model_dump(mode="json", include={"acceptance", "residual"})
        found[f"acceptance of {cell.strategy.name}"] = own
    return found
