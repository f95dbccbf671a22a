"""What all tests share: one thread for each of the two workers, and native kernels compiled once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Two workers with two threads each would spin on two cores; read before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "LANTERN_ACCEL_CPU_LIBRARIES" not in os.environ:
    folder = Path(tempfile.gettempdir()) / f"lantern-accel-tests-{os.getuid()}" / "native"
    os.environ["LANTERN_ACCEL_CPU_LIBRARIES"] = str(folder)
