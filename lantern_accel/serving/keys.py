"""API keys of a service."""

from __future__ import annotations

import os
from pathlib import Path

from lantern_accel.errors import RequestError
from lantern_accel.files import read_lines

#: API keys, with commas between.
KEYS = "LANTERN_ACCEL_API_KEYS"


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Return the API keys of a file and of the environment; raises RequestError where there are none."""
    found = [key.strip() for key in os.environ.get(KEYS, "").split(",")]
    if path is not None:
        try:
            lines = read_lines(path)
        except OSError as error:
            why = f"the API keys in {path} cannot be read ({error.strerror})"
            raise RequestError(f"{why}; name a file with one key per line") from None
        if not any(lines):
            raise RequestError(f"{path} holds no API key; write one per line")
        found += lines
    return tuple(dict.fromkeys(key for key in found if key))
