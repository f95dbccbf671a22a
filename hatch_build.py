"""Put the native CPU kernels into a wheel where LANTERN_ACCEL_BUILD_NATIVE is 1.

Without it the wheel is pure Python and runs anywhere; a machine with a compiler then builds the kernels
on first use. With it the wheel is one of this platform, and a build that fails is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface[Any]):
    """Compile the library next to its sources and tag the wheel with the platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("LANTERN_ACCEL_BUILD_NATIVE") != "1":
            return
        root = Path(self.root)
        made = root / "backends" / "lantern_accel_cpu" / "native" / "lantern_native.so"
        # The builder has no torch, and the module that compiles needs none.
        paths = os.pathsep.join((str(root), str(root / "backends")))
        call = [sys.executable, "-m", "lantern_accel_cpu.native.build", "-o", str(made)]
        subprocess.run(call, check=True, env={**os.environ, "PYTHONPATH": paths}, cwd=root)
        build_data["force_include"][str(made)] = "lantern_accel_cpu/native/lantern_native.so"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        # No part of Python is linked: one wheel serves every version.
        build_data["tag"] = f"py3-none-{platform}"
