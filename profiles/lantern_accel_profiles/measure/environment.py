"""Describes what figures were measured with: software, commit, the device's state, other programs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from lantern_accel._version import __version__
from lantern_accel.device import host_load
from lantern_accel.device.backend import Backend
from lantern_accel.device.host_load import BUSY
from lantern_accel.errors import BackendError, RequestError
from lantern_accel_profiles.measure.record import (
    Environment,
    NotMeasured,
    Reading,
    is_measured,
    not_measured,
)

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "Pillow")


def describe(backend: Backend, dtype: torch.dtype) -> Environment:
    """Describe the machine, the software and the device's conditions before a measurement."""
    commit, dirty = _once(Path(__file__).parents[1])
    return Environment(
        device=backend.facts(),
        backend=f"{backend.name} {backend.version}",
        dtype=str(dtype).removeprefix("torch."),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        system=platform.platform(),
        load_average=list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        lantern_accel=__version__,
        commit=commit,
        dirty=dirty,
        versions=versions(),
        conditions_before=conditions(backend),
    )


def conditions(backend: Backend) -> dict[str, Reading]:
    """Read clocks, power limit, temperature and other processes; what is not known says so."""
    missing = not_measured(f"backend {backend.name!r} does not read it")
    return {
        name: missing if value is None else float(value)
        for name, value in asdict(backend.conditions()).items()
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit_of(folder: Path) -> tuple[str, bool | NotMeasured]:
    """Return the commit that ``folder`` is checked out at and whether it was changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20
        )
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        # A package that merely lies below somebody's repository is not of that repository.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.TimeoutExpired):
        missing = not_measured("the package is not a git checkout, or git is not installed")
        return missing, missing


#: The commit does not change while a process runs.
_once = cache(commit_of)


class LoadWatch(host_load.HostLoad):
    """The share of the host's cores that other processes used since a moment, as a reading."""

    def others(self) -> Reading:
        """Return the share, 0 to 1 of all cores, from construction until now."""
        found = self.share()
        return not_measured(found) if isinstance(found, str) else found


def busy_note(seconds: float = 0.5) -> str:
    """Look for a moment, and say where other programs use the host's cores; empty where few do."""
    load = LoadWatch()
    time.sleep(seconds)
    return busy_words(load.others())


#: Seconds of each look while :func:`wait_for_quiet` waits.
LOOK = 2.0


def wait_for_quiet(seconds: float, say: Callable[[str], None]) -> None:
    """Say where other programs use the host's cores, and wait until few do, ``seconds`` at most.

    With 0 seconds it only says so. Raises BackendError where the machine is busy to the end.
    """
    note, until = busy_note(), time.monotonic() + seconds
    if note:
        wait = f"; waiting for them, {seconds:g} s at most" if seconds else ""
        say(f"warning: {note}; samples of that time get no verdict{wait}")
    while note and time.monotonic() < until:
        note = busy_note(LOOK)
    if note and seconds:
        raise BackendError(
            f"after {seconds:g} s other programs are still active, so nothing was measured: {note}; "
            "without --wait the command measures anyway"
        )


def busy_words(share: Reading) -> str:
    """Say what a share of the host's cores that others use means for times; empty where it is small."""
    if not is_measured(share) or share < BUSY:
        return ""
    cores = os.cpu_count() or 1
    return (
        f"other programs use {share * cores:.1f} of {cores} cores, so timings are slower and noisier; "
        "wait for them, or measure elsewhere"
    )


def check_clock(backend: Backend) -> None:
    """Raise RequestError on a simulated device, whose times are not those of what it stands for."""
    if backend.simulated:
        raise RequestError(
            f"the {backend.facts().name} is a simulation, and its times are not those of "
            f"{backend.name!r}; measure on a real device"
        )
