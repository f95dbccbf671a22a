"""The backend's options, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lantern_accel.device.spec import check_options
from lantern_accel.errors import BackendError

KNOWN = {
    "check": "on (the default) uses a device only after it passed the self-check on this machine, again "
    "repeats the check, off leaves it out",
    "capture": "on (the default) records steps where torch has graphs for the device, off gives it one "
    "operator after another",
}


@dataclass(frozen=True)
class Options:
    """What a user may ask of the backend."""

    check: str = "on"
    capture: bool = True
    capture_asked: bool = False
    """Whether the user asked for recorded steps by name."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Options:
        """Raise BackendError for an option or a value that there is not."""
        check_options("torch", options, KNOWN)
        check = str(options.get("check", "on"))
        if check not in ("on", "off", "again"):
            raise BackendError(f"backend 'torch' got check={check!r}; give on, off or again")
        capture = str(options.get("capture", "on"))
        if capture not in ("on", "off"):
            raise BackendError(f"backend 'torch' got capture={capture!r}; give on or off")
        return cls(check, capture == "on", "capture" in options and capture == "on")
