"""What the software HPU needs of the host: a compiler, and how many cards it shows."""

from __future__ import annotations

import os
import shutil

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
