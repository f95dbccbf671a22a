"""Reads JSON that a command wrote: whole or refused, and continued only as what it is.

Nothing here imports torch: whether a file can be continued is asked before the device is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lantern_accel.errors import RequestError
from lantern_accel.files import read_json_file
from lantern_accel.records import first_wrong

RecordT = TypeVar("RecordT", bound=BaseModel)


def read_json(path: Path, command: str = "lantern-accel profile") -> dict[str, object]:
    """Return a file's JSON object; raises RequestError saying why it is none."""
    try:
        data = read_json_file(path)
    except FileNotFoundError:
        raise RequestError(
            f"there is no file {path}; measure one with `{command} -o {path}`"
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); name another file") from None
    except ValueError as error:
        why = f"{path} cannot be read ({str(error)[:80]})"
        raise RequestError(f"{why}, perhaps an incomplete copy; copy it or measure again") from None
    if not isinstance(data, dict):
        raise RequestError(f"{path} is JSON, but not a run of `{command}`; leave it out")
    return data


def validate_file(model: type[RecordT], path: Path, data: Mapping[str, object]) -> RecordT:
    """Return a file's data as a record; raises RequestError naming the first field that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise RequestError(
            f"{path} is refused: {first_wrong(error)}; leave it out, or measure it again"
        ) from None


def difference(
    theirs: Mapping[str, object], ours: Mapping[str, object]
) -> tuple[str, object, object] | None:
    """Return the first key that differs, and its two values; None where none does."""
    # Plain values first: they say what differs in fewer words than a table of sizes.
    keys = sorted({**ours, **theirs}, key=lambda name: isinstance(theirs.get(name), dict))
    both = ((name, theirs.get(name), ours.get(name)) for name in keys)
    return next((one for one in both if one[1] != one[2]), None)


def check_same(
    path: Path | str, theirs: Mapping[str, object], ours: Mapping[str, object], another: str
) -> None:
    """Raise RequestError where what a path holds is of something else; ``another``: to name instead."""
    if found := difference(theirs, ours):
        name, was, now = found[0].replace("_", " "), *(repr(one)[:100] for one in found[1:])
        raise RequestError(
            f"{path} cannot be resumed: its {name} is {was}, not {now}; name another {another}"
        )
