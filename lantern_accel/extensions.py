"""Finds what other packages add to the command and to the service: entry points of a group."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterator
from typing import Any

from lantern_accel.errors import LanternWarning

#: Commands of ``lantern-accel``: functions with a signature that typer reads, or groups of typer's.
COMMANDS = "lantern_accel.commands"
#: Routes of the service: functions of the application (FastAPI) and its pipeline.
ROUTES = "lantern_accel.routes"


def load_extensions(group: str) -> Iterator[tuple[str, Any]]:
    """Go through the names and objects of a group, by name; warn of each that cannot be loaded."""
    # A package that is installed twice (a wheel and an editable one) has two equal entry points.
    for name, value in sorted(
        {(p.name, p.value) for p in importlib.metadata.entry_points(group=group)}
    ):
        try:
            found = importlib.metadata.EntryPoint(name, value, group).load()
        except Exception as error:  # a stranger's module may do anything
            warnings.warn(
                f"{name!r} ({group}) cannot be loaded from {value!r}: {error}; update or remove the "
                "package that has it",
                LanternWarning,
                stacklevel=2,
            )
        else:
            yield name, found
