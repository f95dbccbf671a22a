"""The software HPU: torch's ``hpu`` device on the host, to run the backend's own code without a card.

:func:`enable` compiles ``device.cpp``, which registers an allocator, a device guard and the CPU's
kernels under torch's own dispatch key for ``hpu``, and stands a small ``torch.hpu`` next to it. What
runs there is the backend's real code; what it proves is correctness, never speed.
"""

from __future__ import annotations

from types import ModuleType

from lantern_accel_hpu.software.host import missing, modules

__all__ = ["enable", "missing", "modules"]


def enable() -> ModuleType:
    """Register the software HPU with torch in this process and return its ``torch.hpu``.

    Compiles on first use (some seconds; kept in the cache folder). Calling it again is harmless.
    Raises BackendError without a compiler, where it fails, and where another ``hpu`` is registered.
    """
    from lantern_accel_hpu.software.register import register

    return register()
