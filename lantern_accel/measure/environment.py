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
from lantern_accel.device.backend import Backend
from lantern_accel.errors import BackendError
from lantern_accel.measure.record import (
    Environment,
    NotMeasured,
    Reading,
    is_measured,
    not_measured,
)

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "Pillow")


def describe(backend: Backend, dtype: torch.dtype) -> Environment:
    """Describe the machine, the software and the device's conditions before a measurement."""
    commit, dirty = _own_commit()
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


@cache
def _own_commit() -> tuple[str, bool | NotMeasured]:
    return commit_of(Path(__file__).parents[1])


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


class HostLoad:
    """The share of the host's cores that other processes used since a moment.

    Reads ``/proc/stat``; where there is none, :meth:`others` says so.
    """

    def __init__(self) -> None:
        self._ticks = _system_ticks()
        self._own = self.ours()
        self._at = time.perf_counter()

    def ours(self) -> float:
        """Return the seconds that this process has used."""
        return _own_seconds()

    def others(self) -> Reading:
        """Return the share, 0 to 1 of all cores, from construction until now."""
        ticks = _system_ticks()
        if self._ticks is None or ticks is None:
            return not_measured("the system has no /proc/stat")
        elapsed = time.perf_counter() - self._at
        cores = os.cpu_count() or 1
        if elapsed < 0.05:
            return not_measured("the sample is shorter than the system's clock tick shows")
        busy = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
        share = (busy - (self.ours() - self._own)) / (elapsed * cores)
        return min(max(share, 0.0), 1.0)


#: Share of the host's cores above which other programs are named, and no speed is judged.
BUSY = 0.1


def busy_note(seconds: float = 0.5) -> str:
    """Look for a moment, and say where other programs use the host's cores; empty where few do."""
    load = HostLoad()
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
        say(f"{note}; what is measured meanwhile gets no verdict")
    if note and seconds:
        say(f"waiting for other programs, {seconds:g} s at most")
    while note and time.monotonic() < until:
        note = busy_note(min(LOOK, max(until - time.monotonic(), 0.1)))
    if note and seconds:
        raise BackendError(
            f"after {seconds:g} s other programs are still at work, and nothing was measured: {note}; "
            "without --wait it is measured all the same"
        )


def busy_words(share: Reading) -> str:
    """Say what a share of the host's cores that others use means for times; empty where it is small."""
    if not is_measured(share) or share < BUSY:
        return ""
    cores = os.cpu_count() or 1
    return (
        f"this machine is not alone: other programs use {share * cores:.1f} of its {cores} cores, so "
        "that times are longer and spread more; wait for them, or measure elsewhere"
    )


def _own_seconds() -> float:
    return sum(os.times()[:4])  # user and system, with those of children


def _system_ticks() -> int | None:
    """Return the busy ticks of all cores: user, nice, system, irq, softirq, steal."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        values = [int(field) for field in fields[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = values
    return user + nice + system + irq + softirq + steal
