"""Scripts in processes of their own: the software HPU is registered with torch once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

COMMAND = "from lantern_accel.cli import main; raise SystemExit(main())"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def software_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder of the session, where the device is compiled once."""
    given = os.environ.get("LANTERN_ACCEL_CACHE")
    return Path(given) if given else tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def on_software_hpu(software_cache: Path) -> Run:
    """Return a way to run a script, or the command, where the software HPU can be opened."""
    from lantern_accel_hpu import software

    if reason := software.missing():
        pytest.skip(reason)

    def run(*words: str, script: str = "", **changed: str) -> subprocess.CompletedProcess[str]:
        call = [
            sys.executable,
            "-c",
            script or "import lantern_accel.cli as c; raise SystemExit(c.main())",
        ]
        ours = [str(ROOT), str(ROOT / "backends"), str(ROOT / "tests")]
        paths = [*ours, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "LANTERN_ACCEL_CACHE": str(software_cache),
            "LANTERN_HPU_SOFTWARE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **changed,
        }  # fmt: skip
        return subprocess.run(
            [*call, *words], capture_output=True, text=True, env=environment, timeout=900
        )

    return run
