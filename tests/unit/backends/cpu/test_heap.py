"""The heap: tensors that go leave no holes that the next ones do not fit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lantern_accel_cpu import heap

ROOT = Path(__file__).resolve().parents[4]
# Sizes that do not fit the holes of those before, with something small that stays between them.
SCRIPT = """
import re, torch
from pathlib import Path
from lantern_accel_cpu.heap import giving_back

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

torch.ones(2**22).add(1)
before, kept = resident("VmRSS"), []
Path("/proc/self/clear_refs").write_text("5")
with giving_back():
    for megabytes in range(10, 30):
        large = torch.ones(megabytes * 2**18)
        kept.append(torch.ones(2**10))
        del large
print(resident("VmHWM") - before)
"""


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")


@glibc
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's VmHWM")
def test_large_tensors_leave_the_process_when_they_go() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    # Left alone, glibc took 45 MB.
    assert int(done.stdout) < 36 * 2**20, "the largest alone has 29"


@glibc
def test_a_heap_that_the_user_has_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert heap._mallopt.__wrapped__() is not None
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")
    assert heap._mallopt.__wrapped__() is None
