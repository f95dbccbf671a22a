"""Files of measurements: read whole or refused, continued only as what they are, written as they grow.

Nothing here imports torch: whether a file can be written is asked before the device is opened.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lantern_accel.errors import RequestError
from lantern_accel.files import check_target, read_json_file, write_json
from lantern_accel.records import first_wrong

RecordT = TypeVar("RecordT", bound=BaseModel)
#: Bytes a run's file and a trace need on the disk, with a margin.
RUN_BYTES = 32 * 2**20
TRACE_BYTES = 256 * 2**20
#: Characters of a run's name at most.
LONGEST_NAME = 80
#: Seconds between two writes of a file while samples are taken.
WRITE_EVERY = 1.0


# --- asked before any work ------------------------------------------------------------------------


def check_name(name: str | None) -> None:
    """Raise RequestError for a run's name that is longer than reports can show."""
    if name is not None and len(name) > LONGEST_NAME:
        raise RequestError(
            f"the name {name[:20] + '...'!r} has {len(name)} characters; {LONGEST_NAME} are the most"
        )


def check_output(out: Path, *, resume: bool, trace: Path | None = None) -> None:
    """Raise RequestError where a file cannot be written, exists and is not resumed, or has no space."""
    if out.suffix != ".json":
        raise RequestError(f"{out} is not named .json; name the run's file so with -o")
    try:
        if out.exists() and not resume:
            raise RequestError(
                f"{out} exists already; --resume completes it, or name another file with -o"
            )
        for path, needed in ((out, RUN_BYTES), (trace, TRACE_BYTES)):
            if path is not None:
                _check_room(path, needed)
    except OSError as error:
        raise RequestError(
            f"{error.filename or out} cannot be written ({error.strerror}); choose another folder"
        ) from None


def _check_room(path: Path, needed: int) -> None:
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent):
        pass
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise RequestError(
            f"{path.parent} has {free / 2**20:.0f} MiB free, {path.name} may need "
            f"{needed / 2**20:.0f}; free some space or choose another folder"
        )


# --- reading --------------------------------------------------------------------------------------


def read_json(path: Path, command: str = "lantern-accel profile") -> dict[str, Any]:
    """Return a file's JSON object; raises RequestError saying why it is none."""
    try:
        data = read_json_file(path)
    except FileNotFoundError:
        raise RequestError(
            f"there is no file {path}; measure one with `{command} -o {path}`"
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); name another file") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{path} is not whole JSON (line {error.lineno}: {error.msg}), perhaps an incomplete "
            "copy; copy it again or measure again"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise RequestError(f"{path} is not a run ({str(error)[:80]}); leave it out") from None
    if not isinstance(data, dict):
        raise RequestError(f"{path} is JSON, but not a run of `{command}`; leave it out")
    return data


def validated(model: type[RecordT], path: Path, data: Mapping[str, Any]) -> RecordT:
    """Return a file's data as a record; raises RequestError naming the first field that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise RequestError(
            f"{path} is refused: {first_wrong(error)}; leave it out, or measure it again"
        ) from None


def read(path: Path, model: type[RecordT], command: str = "lantern-accel profile") -> RecordT:
    """Read a record that names its ``kind`` and ``schema_version``; raises RequestError."""
    return from_data(path, model, read_json(path, command), command)


def from_data(
    path: Path,
    model: type[RecordT],
    data: Mapping[str, Any],
    command: str = "lantern-accel profile",
) -> RecordT:
    """Return what :func:`read` does, of data that was read already."""
    fields = model.model_fields
    kind = fields["kind"].default if "kind" in fields else None
    newest = fields["schema_version"].default
    if data.get("kind") != kind:
        raise RequestError(
            f"{path} is JSON, but not a run of `{command}`: its kind is not {kind!r}; leave it out or "
            f"measure one with `{command} -o`"
        )
    version = data.get("schema_version")
    if type(version) is not int or version != newest:
        newer = type(version) is int and version > newest
        raise RequestError(
            f"{path} has schema version {version!r}, this lantern-accel reads {newest}; "
            + ("upgrade lantern-accel or measure it again" if newer else "measure it again")
        )
    return validated(model, path, data)


# --- resuming and writing -------------------------------------------------------------------------


def resume(
    path: Path | None,
    fresh: RecordT,
    identity: Callable[[RecordT], Mapping[str, Any]],
    command: str = "lantern-accel profile",
) -> RecordT:
    """Return what a file holds of the same measurement; ``fresh`` where there is no file.

    ``identity`` gives what both must share, by the name that a message uses. Raises RequestError for
    a measurement of something else.
    """
    if path is None or not path.is_file():
        return fresh
    stored = read(path, type(fresh), command)
    check_same(path, identity(stored), identity(fresh), "file with -o")
    return stored


def check_same(
    path: Path | str, theirs: Mapping[str, Any], ours: Mapping[str, Any], another: str
) -> None:
    """Raise RequestError where what a path holds is of something else; ``another``: to name instead."""
    # Plain values first: they say what differs in fewer words than a table of sizes.
    for key in sorted({*theirs, *ours}, key=lambda k: (isinstance(theirs.get(k), dict), k)):
        if theirs.get(key) != ours.get(key):
            was, now = (repr(one.get(key))[:100] for one in (theirs, ours))
            raise RequestError(
                f"{path} cannot be resumed: its {key.replace('_', ' ')} is {was}, not {now}; name "
                f"another {another}"
            )


def resume_own(
    path: Path, fresh: RecordT, identity: Callable[[RecordT], Mapping[str, Any]]
) -> RecordT:
    """Return what a file of the cache holds of the same measurement; ``fresh`` where it holds no such.

    A file of other settings, or a damaged one, is the cache's own and nobody's result: it is replaced.
    """
    try:
        return resume(path, fresh, identity)
    except RequestError:
        return fresh


class Keeper:
    """Writes a record as it grows, whole each time and not more often than every second."""

    def __init__(self, path: Path | None, record: BaseModel) -> None:
        self.path, self.record = path, record
        self._written = 0.0

    def __call__(self, *, force: bool = True) -> None:
        """Write now, or with ``force=False`` where the last write is old; raises RequestError."""
        if self.path is None or not (force or time.monotonic() - self._written >= WRITE_EVERY):
            return
        try:
            write_json(self.path, self.record.model_dump(mode="json"))
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be written ({error.strerror}); what was written before is whole: "
                "free some space and run the same command with --resume"
            ) from None
        self._written = time.monotonic()
