"""Files of measurements: named and checked before any work, continued, and written as they grow.

Nothing here imports torch: whether a file can be written is asked before the device is opened.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from lantern_accel.errors import RequestError
from lantern_accel.files import check_target, write_json
from lantern_accel.store import RecordT, read_json, validate_file
from lantern_accel.store import check_same as check_same

#: Bytes a run's file and a trace need on the disk, with a margin.
RUN_BYTES = 32 * 2**20
TRACE_BYTES = 256 * 2**20
#: Characters of a run's name at most.
LONGEST_NAME = 80
#: Seconds between two writes of a file while samples are taken.
WRITE_EVERY = 1.0
#: A commit that is known, and as many of its characters as people read.
COMMIT, READ = re.compile(r"[0-9a-f]{7,64}"), 7
#: What pydantic calls a field that a record of another version has, or lacks.
OTHER_FORM = {"missing", "extra_forbidden"}


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


def read(path: Path, model: type[RecordT], command: str = "lantern-accel profile") -> RecordT:
    """Read a record that names its ``kind`` and ``schema_version``; raises RequestError."""
    return from_data(path, model, read_json(path, command), command)


def from_data(
    path: Path,
    model: type[RecordT],
    data: Mapping[str, object],
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
    version, environment = data.get("schema_version"), data.get("environment")
    known = type(version) is int and version == newest
    found = environment.get("commit") if isinstance(environment, dict) else None
    commit = found[:READ] if isinstance(found, str) and COMMIT.fullmatch(found) else ""
    try:
        if known:
            return model.model_validate(data)
    except ValidationError as error:
        if not commit or not OTHER_FORM.intersection(one["type"] for one in error.errors()):
            return validate_file(model, path, data)  # raises the same with the field's name
    newer = type(version) is int and version > newest
    raise RequestError(
        f"{path} has schema version {version!r}{commit and ' of commit '}{commit}, this lantern-accel "
        f"reads {newest}{' in another form' if known else ''}; "
        + ("upgrade lantern-accel or " if newer else "")
        + f"measure it again with `{command}`{commit and ', or check out '}{commit}"
    )


# --- resuming and writing -------------------------------------------------------------------------


def resume(
    path: Path | None,
    fresh: RecordT,
    identity: Callable[[RecordT], Mapping[str, object]],
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


def resume_own(
    path: Path, fresh: RecordT, identity: Callable[[RecordT], Mapping[str, object]]
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
