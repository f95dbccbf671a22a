"""The software HPU: torch's ``hpu`` device on the host, to run the backend's own code without a card.

``register`` compiles ``device.cpp``, which registers an allocator, a device guard and the CPU's
kernels under torch's own dispatch key for ``hpu``, and stands a small ``torch.hpu`` next to it. What
runs there is the backend's real code; what it proves is correctness, never speed. This module imports
nothing of torch and builds nothing.
"""

from __future__ import annotations

import os
import shutil

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
