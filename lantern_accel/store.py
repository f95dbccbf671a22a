"""Reads JSON that a command wrote: whole or refused, and continued only as what it is.

Nothing here imports torch: whether a file can be continued is asked before the device is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lantern_accel.errors import RequestError
from lantern_accel.files import read_json_file
from lantern_accel.records import first_wrong

RecordT = TypeVar("RecordT", bound=BaseModel)


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
