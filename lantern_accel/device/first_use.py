"""Checks an opened device: that it computes, and that it answers what it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lantern_accel.device.entry_points import why
from lantern_accel.errors import BackendError

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


#: What to do about a plug-in that does not keep to the backend interface.
REPORT = "report it to the plug-in's author"

Answer = TypeVar("Answer")


def ask(
    backend: str, hook: str, call: Callable[[], object], kind: type[Answer], hint: str = REPORT
) -> Answer:
    """Return what a hook of a backend answers; raise BackendError for a failure or another type.

    A BackendError of its own passes as it is: it is written to be read, about a wrong option for example.
    """
    try:
        found = call()
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        raise BackendError(f"backend {backend!r} failed in {hook}: {why(error)}; {hint}") from error
    if not isinstance(found, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise BackendError(
            f"backend {backend!r} failed in {hook}: it returned a {type(found).__name__}, not "
            f"{article} {kind.__name__}; {REPORT}"
        )
    return found


def first_use(backend: Backend) -> None:
    """Allocate on a device and wait for it, so that one that is busy or has no kernels fails now.

    Errors come out as the backend explains them. Raises BackendError, too, where the backend describes
    itself by something of another type.
    """
    import torch

    from lantern_accel.device.backend import DTYPES, DeviceFacts, MemoryUse

    try:
        torch.zeros(8, device=backend.device).add_(1)
        backend.synchronize()
    except Exception as error:
        known = error if isinstance(error, BackendError) else backend.explain(error)
        if known is error:
            raise
        raise known or BackendError(
            f"backend {backend.name!r} opened {backend.device}, but its first allocation failed: "
            f"{why(error)}; check with the vendor's tools that the device is free, or use another "
            "(`lantern-accel devices` lists them)"
        ) from error
    dtypes = backend.compute_dtypes()
    able = isinstance(dtypes, (tuple, list)) and all(one in DTYPES.values() for one in dtypes)
    if not able or not dtypes:
        raise BackendError(
            f"backend {backend.name!r} failed in compute_dtypes: it returned {dtypes!r}, not a tuple "
            f"of torch's {', '.join(DTYPES)}; {REPORT}"
        )
    for name, kind in {"facts": DeviceFacts, "memory": MemoryUse, "counters": dict}.items():
        ask(backend.name, name, getattr(backend, name), kind)
