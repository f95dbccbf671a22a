"""Measuring a fleet: one run of ``lantern-accel profile`` per kind of device, as a task of Ray's.

Runs are made one after another, so that none disturbs another on the same machine. A run is written cell
by cell where it is measured; Ray starts a task that was killed again, and it goes on in that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lantern_accel.distributed.fleet import Kind, known_kinds, lines_of, placement, read_workers
from lantern_accel.errors import BackendError, RequestError
from lantern_accel.files import write_whole

#: Seconds that a device has to be placed before it is given up and named.
PATIENCE = 120.0
#: Names of types of devices by which Ray tells machines of one kind from others.
TYPE = "accelerator_type:"


def answer(device: str) -> str:
    """Return the device, once its place in the cluster is found."""
    return device


def measure(device: str, words: Sequence[str], key: str) -> tuple[bytes, str]:
    """Run ``lantern-accel profile`` with these words; return the run's file, and what went wrong.

    ``key`` names the run: where one of this name was broken off on this machine, it goes on. The file is
    empty where not even its first cell was measured.
    """
    path = Path(tempfile.gettempdir()) / f"lantern-accel-fleet-{os.getuid()}" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    call = [sys.executable, "-m", "lantern_accel", "profile", *words, "--device", device]
    call += ["-o", str(path), *(["--resume"] if path.exists() else [])]
    done = subprocess.run(call, capture_output=True, text=True)
    found = path.read_bytes() if path.exists() else b""
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return found, (lines[-1] if lines else f"it ended with {done.returncode}")[:500]
    with contextlib.suppress(OSError):
        path.unlink()
    return found, ""


@dataclass(frozen=True)
class Measured:
    """One kind of device: its run's file, or why there is none (then ``file`` may be a part of it)."""

    name: str
    file: bytes
    error: str


def models_of(resources: Mapping[str, float], workers: str) -> list[Kind]:
    """Return what is measured once each: every kind of accelerator, its types where there are several.

    ``workers``: ``auto`` (processors too), or kinds as :func:`~.fleet.read_workers` takes them.
    """
    auto = workers == "auto"
    kinds = known_kinds(resources) if auto else read_workers(workers, resources, None)
    if not kinds:
        raise RequestError("this cluster has no device to measure; start its nodes first")
    types = sorted(name.removeprefix(TYPE) for name in resources if name.startswith(TYPE))
    several = types if len(types) > 1 else [""]
    return [
        replace(kind, count=1, type=one)
        for kind in kinds
        for one in (several if kind.resource == "GPU" else [""])
    ]


def measure_fleet(
    ray: Any,
    kinds: Sequence[Kind],
    words: Sequence[str],
    *,
    patience: float = PATIENCE,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Measured]:
    """Measure every kind of device in turn; one that is not placed in time, or is lost, is named."""
    digest = hashlib.sha256(repr(list(words)).encode()).hexdigest()[:12]
    cores = int(ray.cluster_resources().get("CPU", 1))
    for kind in kinds:
        say(f"measuring {kind.name}")
        # All cores, so that nobody else computes next to a processor that is measured.
        options = placement(kind, cores if kind.resource == "CPU" else None)
        if kind.type:
            options["resources"] = {**options.get("resources", {}), f"{TYPE}{kind.type}": 0.001}
        fate = "could not begin"
        try:
            ray.get(ray.remote(answer).options(**options).remote(kind.device), timeout=patience)
            fate = "was lost"
            task = ray.remote(measure).options(**options, max_retries=1)
            run = ray.get(task.remote(kind.device, list(words), f"{kind.name}-{digest}"))
            yield Measured(kind.name, *run)
        except ray.exceptions.GetTimeoutError:
            yield Measured(kind.name, b"", f"it did not answer within {patience:g} s")
        except ray.exceptions.RayError as error:
            yield Measured(kind.name, b"", f"its worker {fate} ({lines_of(error)[0][:200]})")


def write_runs(
    folder: Path, measured: Iterator[Measured], say: Callable[[str], None]
) -> list[Path]:
    """Write every run's file into a folder as it comes; return those that are there.

    Raises BackendError where there is none.
    """
    written, wrong = [], []
    for one in measured:
        if one.error:
            wrong.append(f"{one.name}: {one.error}")
            say(wrong[-1])
        if one.file:
            written.append(folder / f"{one.name}.json")
            write_whole(written[-1], one.file)
    if not written:
        raise BackendError(f"no device could be measured: {'; '.join(wrong)}")
    return written
