"""Backend plug-in ``torch``; importing it imports neither torch nor a vendor SDK."""

from __future__ import annotations

from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.device.spec import BackendSpec


@hookimpl
def lantern_accel_backends() -> list[BackendSpec]:
    """Return this plug-in's one backend."""
    from lantern_accel_torch.spec import Spec

    return [Spec()]
