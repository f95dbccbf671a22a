"""Backend plug-in ``abacus``; importing it imports neither torch nor a vendor SDK."""

from __future__ import annotations

from lantern_accel.device import BackendSpec, hookimpl


@hookimpl
def lantern_accel_backends() -> list[BackendSpec]:
    """Return this plug-in's one backend."""
    from lantern_accel_abacus.spec import Spec

    return [Spec()]
