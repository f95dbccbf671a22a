"""Taking files back: runs, benchmark files of older days, conformance reports; and what may be compared.

A file is read whole, checked against its schema and against itself (a stopwatch that did not wait
shows in the samples), migrated where it is older, or refused with the reason.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lantern_accel.errors import RequestError
from lantern_accel.measure.bench import BenchReport
from lantern_accel.measure.intervals import digest
from lantern_accel.measure.record import (
    KIND,
    SCHEMA,
    Cell,
    Environment,
    PromptSet,
    Run,
    Sample,
    Session,
    Settings,
    is_measured,
    not_measured,
)
from lantern_accel.measure.record import Plan as RunPlan
from lantern_accel.strategy.values import Sampling
from lantern_accel.testing.kit import Report as ConformanceReport

#: Stopwatch over host clock, summed over the samples of a cell: outside, the stopwatch is wrong.
CLOCK_RATIO = (0.8, 1.05)
#: Host seconds a request that the stopwatch rightly leaves out (checking, making pictures).
CLOCK_SLACK = 0.02
BENCH_GAP = not_measured("a benchmark file does not have it; `lantern-accel profile` measures it")


def read_file(path: Path) -> Run | ConformanceReport:
    """Read a run (migrating a benchmark file) or a conformance report; raises RequestError."""
    data = _json(path)
    if data.get("kind") == KIND:
        return _run(path, data)
    if {"settings", "environment", "cells"} <= data.keys() and "kind" not in data:
        return _migrated(path, data)
    if {"outcomes", "backend_version"} <= data.keys():
        report: ConformanceReport = _validated(ConformanceReport, path, data)
        return report
    if data.get("kind") == "lantern_accel.comparison":
        raise RequestError(
            f"{path} is a report of `lantern-accel compare`; name the runs that it was made from"
        )
    raise RequestError(
        f"{path} is JSON, but no run of `lantern-accel profile`: it has no kind {KIND!r}; leave it "
        "out or measure one with `lantern-accel profile -o`"
    )


def read_run(path: Path) -> Run:
    """Read one run; raises RequestError for anything else."""
    found = read_file(path)
    if not isinstance(found, Run):
        raise RequestError(f"{path} is a conformance report, not a run; name a run")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(
            f"there is no file {path}; measure one with `lantern-accel profile -o {path}`"
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); name another file") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{path} is not whole JSON (line {error.lineno}: {error.msg}), perhaps a copy that "
            "broke off; copy it again or measure anew"
        ) from None
    except RecursionError:
        raise RequestError(f"{path} is JSON nested too deep to be a run; leave it out") from None
    except ValueError:
        raise RequestError(f"{path} is not text, so it is not a run; name another file") from None
    if not isinstance(data, dict):
        raise RequestError(f"{path} is JSON, but no run of `lantern-accel profile`; leave it out")
    return data


def _validated(model: Any, path: Path, data: Mapping[str, Any]) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(
            f"{path} is refused: {where + ': ' if where else ''}{message}; leave it out, or measure it "
            "again"
        ) from None


def _run(path: Path, data: dict[str, Any]) -> Run:
    version = data.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA:
        newer = type(version) is int and version > SCHEMA
        raise RequestError(
            f"{path} has schema version {version!r}, this lantern-accel reads 1 to {SCHEMA}; "
            + ("upgrade lantern-accel or measure it again" if newer else "measure it again")
        )
    run: Run = _validated(Run, path, data)
    for cell in run.cells:
        fault = clock_fault(cell)
        if fault:
            raise RequestError(
                f"{path} is refused: {cell.name}: {fault}; correct the backend's stopwatch() and measure "
                "it again"
            )
    return run


def clock_fault(cell: Cell) -> str:
    """Say how a cell's stopwatch contradicts the host's clock; empty where it does not.

    A request ends with its pictures on the host, so that both clocks see the same work. A stopwatch
    that does not wait for the device sees only the launches.
    """
    totals = [s.total for s in cell.samples if is_measured(s.total)]
    walls = [s.wall for s in cell.samples if is_measured(s.wall)]
    if not totals or not walls:
        return ""
    watch, wall = statistics.median(totals), statistics.median(walls)
    parts = statistics.median(s.prefill + s.decode for s in cell.samples)
    low, high = CLOCK_RATIO
    if watch < low * wall - CLOCK_SLACK or watch > high * wall + CLOCK_SLACK:
        return (
            f"the stopwatch reads {watch:.4f} s where the host's clock saw {wall:.4f} s; it does not "
            "wait for the device, so no speed can be taken from it"
        )
    if parts > high * watch + CLOCK_SLACK:
        return (
            f"decoding took {parts:.4f} s of a request of {watch:.4f} s; the parts exceed the whole"
        )
    return ""


# --- migration --------------------------------------------------------------------------------


def _migrated(path: Path, data: dict[str, Any]) -> Run:
    """Turn a file of ``lantern-accel bench`` into a run without what it did not measure."""
    bench: BenchReport = _validated(BenchReport, path, data)
    settings = bench.settings
    tokens = {s.tokens // cell.batch for cell in bench.cells for s in cell.samples if cell.batch}
    if len(tokens) != 1:
        raise RequestError(
            f"{path} is refused: its samples have {len(tokens)} image sizes, not one; leave it out"
        )
    try:
        run = Run(
            name=f"{path.stem} (bench)",
            state="complete",
            command=f"lantern-accel profile --model {settings['model']} -o run.json",
            migrated_from=f"lantern-accel bench, schema {bench.schema_version}",
            settings=Settings(
                model=settings["model"],
                weights_hash=settings["weights_hash"],
                tokens=tokens.pop(),
                sampling=Sampling.model_validate(settings["sampling"]),
                prompts=PromptSet(
                    source="bench",
                    count=len(settings["prompts"]),
                    sha256=digest(settings["prompts"]),
                    used=settings["prompts"][:64],
                ),
                seed=0,
                dtype=settings["dtype"],
                plan=RunPlan(quick=True, samples=2, seconds=0, quality_images=0),
            ),
            environment=Environment.model_validate(bench.environment),
            clock=BENCH_GAP,
            ceilings=BENCH_GAP,
            sessions=[Session(started="unknown", load_seconds=0.0)],
            cells=[_migrated_cell(cell) for cell in bench.cells if cell.samples],
            conformance=BENCH_GAP,
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise RequestError(
            f"{path} is refused: a benchmark file that lacks {_first(error)}; leave it out, or measure "
            "with `lantern-accel profile -o`"
        ) from None
    return run


def _first(error: Exception) -> str:
    """Say in one line what is wrong with a file."""
    if isinstance(error, ValidationError):
        one = error.errors()[0]
        return f"{'.'.join(map(str, one['loc']))} ({one['msg']})"
    return str(error)


def _migrated_cell(cell: Any) -> Cell:
    samples = [
        Sample(
            session=0,
            round=number,
            order=number,
            at=0.0,
            seed=1 + number,
            text=BENCH_GAP,
            prefill=0.0,
            decode=s.seconds,
            pixels=BENCH_GAP,
            total=BENCH_GAP,
            wall=BENCH_GAP,
            images=cell.batch,
            tokens=s.tokens,
            steps=s.steps,
            accepted_histogram=[],
            total_variation=s.total_variation,
            others_cpu=BENCH_GAP,
        )
        for number, s in enumerate(cell.samples)
    ]
    return Cell(
        strategy=cell.strategy,
        batch=cell.batch,
        temperature=cell.temperature,
        cold_seconds=BENCH_GAP,
        warmup=[],
        settled=False,
        memory=BENCH_GAP,
        step_ms=cell.phase_ms or BENCH_GAP,
        work=BENCH_GAP,
        samples=samples,
    )


# --- what may be compared ---------------------------------------------------------------------


def check_comparable(runs: Sequence[Run], origins: Sequence[str]) -> None:
    """Raise RequestError where two runs share a name, or differ in what they are runs of.

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


def _key_properties(run: Run) -> dict[str, Any]:
    """Return what runs of one model must share, by the name a message gives it."""
    settings = run.settings
    found: dict[str, Any] = {
        "protocol version": run.protocol_version,
        "model hash": settings.weights_hash,
        "tokens an image": settings.tokens,
        "prompts": settings.prompts.sha256[:12],
    }
    for field, value in settings.sampling.model_dump().items():
        if field != "temperature":  # cells name theirs
            found[f"sampling {field}"] = value
    for cell in run.cells:
        rule = cell.strategy.acceptance.model_dump(mode="json") | {
            "residual": cell.strategy.residual
        }
        found[f"acceptance of {cell.strategy.name}"] = rule
    return found
