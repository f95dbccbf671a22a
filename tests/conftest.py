"""What all tests share: the CPU's native kernels are compiled once, not once per cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

if "LANTERN_ACCEL_CPU_LIBRARIES" not in os.environ:
    folder = Path(tempfile.gettempdir()) / f"lantern-accel-tests-{os.getuid()}" / "native"
    os.environ["LANTERN_ACCEL_CPU_LIBRARIES"] = str(folder)
