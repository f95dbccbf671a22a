"""Options of this backend, ``--option name=value``, and what each choice means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lantern_accel.device.spec import check_options
from lantern_accel.errors import DeviceRequestError, did_you_mean

MODES = ("program", "lazy", "eager")
MEANINGS = {
    "mode": "how a step runs again: its compiled program, traced again at each call, or uncaptured "
    f"({', '.join(MODES)})",
    "cache": "a folder for compiled programs, which a later process loads instead of compiling",
}


@dataclass(frozen=True)
class Options:
    """Checked choices.

    ``mode``: see :mod:`lantern_accel_xla.programs`. ``cache``: empty keeps programs in memory only.
    """

    mode: str = "program"
    cache: str = ""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Check options by name and value; raises DeviceRequestError for what there is not."""
        check_options("xla", given, MEANINGS)
        if (mode := given.get("mode", "program")) not in MODES:
            near = did_you_mean(str(mode), MODES)
            raise DeviceRequestError(
                f"backend 'xla' got mode={mode!r}{near or '; use ' + ', '.join(MODES)}"
            )
        return cls(**{name: str(value) for name, value in given.items()})
