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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lantern_accel_cuda.trust import alone

#: Processes at most; seconds that one may take; rounds, the first and two of what ended with its process.
MOST, PATIENCE, ROUNDS = 6, 600.0, 3
#: Free memory that each takes of a GPU: CUDA's context and its libraries.
BYTES = 10**9
#: Exit codes of a process that could not open the GPU, and of one that was ended; 0: all checks ran.
NOT_OPENED, TOOK_TOO_LONG = 3, -1
#: Set in these processes, which start no others.
ONE_OF = "LANTERN_ACCEL_CUDA_CHECKS"


def processes(free: int) -> int:
    """Return how many may run next to this one, on a GPU with ``free`` bytes left; 0: none."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    most = min(MOST, cores, free // BYTES)
    return 0 if most < 2 or os.environ.get(ONE_OF) else most


def check(index: int, kernels: Sequence[str], folder: Path, program: str) -> int:
    """Let a ``program`` check kernels on GPU ``index`` and keep verdicts in ``folder``; its exit code."""
    alone = ["-P"] if sys.version_info >= (3, 11) else []
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            [
                sys.executable,
                *alone,
                "-W",
                "ignore",
                "-c",
                program,
                str(index),
                str(folder),
                *kernels,
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", ONE_OF: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        ).returncode
    return TOOK_TOO_LONG


def run(
    names: list[str], settled: Callable[[str], bool], count: int,
    check: Callable[[list[str]], int], lock: Path | None,
) -> None:  # fmt: skip
    """Check kernels in ``count`` processes; what has no verdict then, this process may check.

    A check that ended with its process runs again in a process of its own. None runs where a GPU serves
    one process alone, or the system starts no more. Sets of processes take turns by ``lock``, and a later
    one finds the verdicts of the one before.
    """
    with (
        contextlib.suppress(OSError),
        alone(lock) if lock else contextlib.nullcontext(),
        ThreadPoolExecutor(count) as threads,
    ):
        left = [name for name in names if not settled(name)]
        for turn in range(ROUNDS):
            shares = [[name] for name in left] if turn else [left[n::count] for n in range(count)]
            shares = [share for share in shares if share]
            codes = list(threads.map(check, shares))
            if NOT_OPENED in codes:
                return
            ended = (share for share, code in zip(shares, codes, strict=True) if code)
            left = [name for share in ended for name in share if not settled(name)]
