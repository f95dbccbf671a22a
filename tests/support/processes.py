"""Scripts that tests run in processes of their own: the software HPU is registered once a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
COMMAND = "import lantern_accel.cli as c; raise SystemExit(c.main())"
#: Where the device is compiled once for all tests of this user.
FOLDER = Path(tempfile.gettempdir()) / f"lantern-accel-tests-{os.getuid()}" / "software"
CACHE = os.environ.get("LANTERN_ACCEL_CACHE") or str(FOLDER)


def passes(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a script printed; fails with its last words where it failed."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def on_software_hpu() -> Run:
    """Return a way to run a script, or the command, where the software HPU can be opened."""
    from lantern_accel_hpu import software

    if reason := software.missing():
        pytest.skip(reason)

    def run(*words: str, script: str = "", **changed: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-c", script or COMMAND]
        ours = [str(ROOT), str(ROOT / "backends"), str(ROOT / "profiles"), str(ROOT / "tests")]
        paths = [*ours, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "LANTERN_ACCEL_CACHE": CACHE,
            "LANTERN_HPU_SOFTWARE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **changed,
        }
        return subprocess.run(
            [*call, *words], capture_output=True, text=True, env=environment, timeout=900
        )

    return run
