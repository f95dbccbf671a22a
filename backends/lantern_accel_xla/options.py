"""Options of this backend, ``--option name=value``, and what each choice means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lantern_accel.device.spec import check_options
from lantern_accel.errors import DeviceRequestError, did_you_mean

CHOICES: dict[str, tuple[str, ...]] = {"mode": ("program", "lazy", "eager")}
MEANINGS = {
    "mode": "how a step runs again: its compiled program, traced again at each call, or uncaptured",
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
        listing = {
            name: f"{meaning} ({', '.join(CHOICES[name])})" if name in CHOICES else meaning
            for name, meaning in MEANINGS.items()
        }
        check_options("xla", given, listing)
        for name, able in CHOICES.items():
            if name in given and given[name] not in able:
                near = did_you_mean(str(given[name]), able)
                raise DeviceRequestError(
                    f"backend 'xla' got {name}={given[name]!r}{near or '; use ' + ', '.join(able)}"
                )
        return cls(**{name: str(value) for name, value in given.items()})
