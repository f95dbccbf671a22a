"""The software HPU: torch's ``hpu`` device on the host, to run the backend's own code without a card.

:func:`enable` compiles ``device.cpp``, which registers an allocator, a device guard and the CPU's
kernels under torch's own dispatch key for ``hpu``, and stands a small ``torch.hpu`` next to it. What
runs there is the backend's real code; what it proves is correctness, never speed. This module imports
nothing of torch and builds nothing.
"""

from __future__ import annotations

import os
import shutil
from types import ModuleType

NAME = "software HPU"


def compiler() -> str | None:
    """Return the path of the C++ compiler: ``$CXX``, else ``g++`` or ``c++``; None without one."""
    given = os.environ.get("CXX")
    names = [given] if given else ["g++", "c++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def missing() -> str:
    """Say what the software HPU lacks on this machine; empty where it can be enabled."""
    if os.name == "posix" and compiler() is not None:
        return ""
    given = os.environ.get("CXX", "g++")
    return (
        f"the {NAME} needs Linux or macOS and a C++ compiler ({given}), and this machine lacks it"
    )


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
