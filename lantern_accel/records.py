"""The base of all records: known fields, one sentence for a wrong one, rows of a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from lantern_accel.errors import what_is_wrong

#: How the text begins that stands for a figure.
NOT_MEASURED = "not measured: "


def not_measured(reason: str) -> str:
    """Return the text that stands for a figure that was not measured, with its reason."""
    return f"{NOT_MEASURED}{reason}"


class Record(BaseModel):
    """A record that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid")


class Frozen(Record):
    """A record whose values stay as they are, so that it can be a key."""

    model_config = ConfigDict(frozen=True)


def first_wrong(error: ValidationError) -> str:
    """Return the first thing that is wrong with a record, after the name of its field."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}{what_is_wrong(first)}".lstrip(": ")


def digest(value: object) -> str:
    """Return the SHA-256 of a JSON value in its canonical form."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table; a cell is one line, with slashes for bars."""
    shown = [[" ".join(str(cell).replace("|", "/").split()) for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, *shown)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def format_bytes(nbytes: int) -> str:
    """Write a number of bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.0f} MiB"
