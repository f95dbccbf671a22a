"""Options that several commands take: a backend's ``--option name=value``, a picture's ``--size``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

#: For a command's signature; every command that opens a device takes it.
OPTION = typer.Option(
    [], metavar="NAME=VALUE", help="An option of the backend (compile=on); repeat for several."
)


def read_options(given: Sequence[str], threads: int | None = None) -> dict[str, Any]:
    """Read ``name=value`` pairs; raises BackendError for what is none."""
    from lantern_accel.errors import BackendError

    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BackendError(f"the option {text!r} is not of the form NAME=VALUE")
        options[name] = int(value) if value.isdigit() else value
    return options


def read_size(text: str | None) -> tuple[int, int] | None:
    """Read ``WxH``; raises :class:`RequestError`."""
    from lantern_accel.errors import RequestError

    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise RequestError(f"the size {text!r} cannot be read; write WIDTHxHEIGHT, such as 768x512")
    return int(parts[0]), int(parts[1])
