"""Can the run have its name and its file? Asked before the device is opened: torch is not imported."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lantern_accel.errors import RequestError

#: Bytes a run file and a trace need on the disk, with room to spare.
RUN_BYTES = 32 * 2**20
TRACE_BYTES = 256 * 2**20


#: Characters of a run's name at most.
LONGEST_NAME = 80


def check_name(name: str | None) -> None:
    """Raise RequestError for a run's name that is longer than reports have room for."""
    if name is not None and len(name) > LONGEST_NAME:
        raise RequestError(
            f"the name {name[:20] + '...'!r} has {len(name)} characters; {LONGEST_NAME} are the most"
        )


def check_output(out: Path, *, resume: bool, trace: Path | None = None) -> None:
    """Raise RequestError where a file could not be written, is there already, or finds no room."""
    if out.suffix != ".json":
        raise RequestError(f"{out} is not named .json; name the run's file so with -o")
    if out.exists() and not resume:
        raise RequestError(
            f"{out} is there already; --resume completes it, or name another file with -o"
        )
    for path, needed in ((out, RUN_BYTES), (trace, TRACE_BYTES)):
        if path is None:
            continue
        if path.is_dir():
            raise RequestError(f"{path} is a folder; name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent):
                pass
            free = shutil.disk_usage(path.parent).free
        except OSError as error:
            raise RequestError(
                f"{path} cannot be written ({error.strerror}); choose another folder"
            ) from None
        if free < needed:
            raise RequestError(
                f"{path.parent} has {free / 2**20:.0f} MiB of room, {path.name} may need "
                f"{needed / 2**20:.0f}; make room or choose another folder"
            )
