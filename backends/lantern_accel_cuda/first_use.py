"""Runs the checks of kernels in several processes at once, before the first engine.

A check is mostly a compilation on one core. A kernel that breaks the GPU breaks the process that checks
it, and this one goes on.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lantern_accel.files import alone

#: Processes at most; seconds that one may take; rounds, the first and two of what ended with its process.
MOST, PATIENCE, ROUNDS = 6, 600.0, 3
#: Free memory that each takes of a GPU: CUDA's context and its libraries.
BYTES = 10**9
#: Exit codes of a process that went through all its checks, and of one that could not open the GPU.
DONE, NOT_OPENED = 0, 3
#: Set in these processes, which start no others.
ONE_OF = "LANTERN_ACCEL_CUDA_CHECKS"

Start = Callable[[list[str]], "subprocess.Popen[bytes]"]


def processes(free: int) -> int:
    """Return how many may run next to this one, on a GPU with ``free`` bytes left; 0: none."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    most = min(MOST, cores, free // BYTES)
    return 0 if most < 2 or os.environ.get(ONE_OF) else most


def start(
    index: int, kernels: Sequence[str], folder: Path, program: str
) -> subprocess.Popen[bytes]:
    """Start a ``program`` that checks kernels on GPU ``index`` and keeps the verdicts in ``folder``."""
    alone = ["-P"] if sys.version_info >= (3, 11) else []
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)
    return subprocess.Popen(
        [sys.executable, *alone, "-W", "ignore", "-c", program, str(index), str(folder), *kernels],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", ONE_OF: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def run(
    names: list[str], settled: Callable[[str], bool], count: int, start: Start, lock: Path | None
) -> None:
    """Check kernels in ``count`` processes; what has no verdict then, this process may check.

    A check that ended with its process runs again in a process of its own. None runs where a GPU serves
    one process alone, or the system starts no more. Sets of processes take turns by ``lock``, and a later
    one finds the verdicts of the one before.
    """
    with contextlib.suppress(OSError), alone(lock) if lock else contextlib.nullcontext():
        left = [name for name in names if not settled(name)]
        for turn in range(ROUNDS):
            shares = [[name] for name in left] if turn else [left[n::count] for n in range(count)]
            shares = [share for share in shares if share]
            again: list[str] = []
            for first in range(0, len(shares), count):
                now = shares[first : first + count]
                for share, code in zip(now, _run_shares(now, start), strict=True):
                    if code == NOT_OPENED:
                        return
                    if code != DONE:
                        again += [name for name in share if not settled(name)]
            if not (left := again):
                return


def _run_shares(shares: Sequence[list[str]], start: Start) -> list[int]:
    """Run a process for each share at once; return their exit codes."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            running.append(start(share))
        codes = []
        for one in running:
            try:
                codes.append(one.wait(PATIENCE))
            except subprocess.TimeoutExpired:
                one.kill()
                codes.append(one.wait())
        return codes
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
                one.wait()
