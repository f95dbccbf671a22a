"""Steps that run next to native kernels: torch computes on this thread alone, and theirs stay free."""

from __future__ import annotations

from collections.abc import Callable

from lantern_accel.device.capture import Replay
from lantern_accel_cpu.native.kernels import Kernels


class NativeReplay(Replay):
    """A step whose products are native.

    What torch still computes there is small. On several threads it would gain little, and OpenMP's would
    go on waiting awake on the cores that the next native call needs: that made steps of more than eight
    tokens twice as slow on two cores.
    """

    def __init__(self, step: Callable[[], None], kernels: Kernels) -> None:
        super().__init__(step)
        self._kernels = kernels

    def __call__(self) -> None:
        """Run the step once on the buffers it was captured with."""
        with self._kernels.alone():
            super().__call__()
