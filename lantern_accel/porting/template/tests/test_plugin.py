"""The plug-in is found, and says what it is without loading anything heavy."""

from __future__ import annotations

import subprocess
import sys

from lantern_accel.device import devices_report


def test_it_is_listed() -> None:
    report = {one.name: one for one in devices_report()}
    assert report["abacus"].state == "ready", report["abacus"].reason


def test_the_module_of_the_entry_point_imports_no_torch() -> None:
    code = "import lantern_accel_abacus.spec, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
