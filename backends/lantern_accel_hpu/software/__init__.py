"""The software HPU: torch's ``hpu`` device on the host, to run the backend's own code without a card.

:func:`enable` compiles ``device.cpp``, which registers an allocator, a device guard and the CPU's
kernels under torch's own dispatch key for ``hpu``, and stands a small ``torch.hpu`` next to it. What
runs there is the backend's real code; what it proves is correctness, never speed.
"""

from __future__ import annotations

import os
import shutil
from types import ModuleType

NAME = "software HPU"


def compiler() -> str | None:
    """Return the path of the C++ compiler: ``$CXX``, else ``g++`` or ``c++``; None without one."""
    given = os.environ.get("CXX")
    for name in [given] if given else ["g++", "c++", "clang++"]:
        if found := shutil.which(name):
            return found
    return None


def missing() -> str:
    """Say what the software HPU lacks on this machine; empty where it can be enabled.

    Imports nothing and builds nothing.
    """
    if os.name != "posix":
        return "the software HPU is built for Linux and macOS only"
    if compiler() is None:
        given = os.environ.get("CXX")
        what = f"the C++ compiler {given!r} that CXX names" if given else "a C++ compiler (g++)"
        return f"the software HPU needs {what}, which is not on the PATH"
    return ""


def modules() -> int:
    """Return how many cards there are, as ``card.h`` counts them."""
    return int(os.environ.get("LANTERN_HPU_SOFTWARE_MODULES") or 8)


def enable() -> ModuleType:
    """Register the software HPU with torch in this process and return its ``torch.hpu``.

    Compiles on first use (some seconds; kept in the cache folder). Calling it again is harmless.
    Raises BackendError without a compiler, where it fails, and where another ``hpu`` is registered.
    """
    from lantern_accel_hpu.software.register import register

    return register()
