"""By how much a process of its own grows while it runs something; a peak can be measured once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import re
from pathlib import Path

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

{setup}
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
{body}
print(resident("VmHWM") - before)
"""
measurable = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads Linux's VmHWM"
)


def growth(setup: str, body: str, environ: Mapping[str, str] | None = None) -> int:
    """Return the peak of ``body`` beyond what is resident after ``setup``, bytes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(ROOT / "profiles")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup, body=body)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environ or {})},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
