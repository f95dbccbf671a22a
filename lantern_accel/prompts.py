"""Files of prompts: plain lines, JSONL, tables, Parquet, and COCO's captions; one image per row."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import RequestError, shown
from lantern_accel.files import is_regular, read_json_file, read_lines, read_text_file

#: Keys of a row that hold its prompt, name and seed; the first that is there counts.
PROMPT_KEYS = ("prompt", "text", "caption", "TEXT", "Prompt")
NAME_KEYS = ("id", "name", "key")
#: Rows of a Parquet file that are read at once.
ROWS_AT_ONCE = 4096

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Item:
    """One image to generate: ``number`` in its file, ``name`` of what is written, and its random stream.

    A row with a seed of its own is image 0 of that seed; any other one is image ``number`` of the run's.
    """

    number: int
    name: str
    prompt: str | int
    seed: int
    index: int


def read_items(path: Path, seed: int) -> list[Item]:
    """Read a file's prompts; raises RequestError where there are none, or a row cannot be used.

    ``.jsonl``: an object per line with ``prompt`` (or ``text``, ``caption``), if wanted ``id`` and
    ``seed``. ``.parquet``, ``.csv`` and ``.tsv``: columns of these names, or PartiPrompts' ``Prompt``.
    ``.json``: COCO's captions (``annotations`` with ``caption`` and ``id``), or a list of such objects.
    Anything else: one prompt per line.
    """
    items: list[Item] = []
    names: set[str] = set()
    for number, row in enumerate(_rows(path)):
        item = _item(row, number, seed, path)
        if item.name.lower() in names:
            raise RequestError(
                f"{path} names two images {item.name!r}; give every row an id of its own, or none"
            )
        names.add(item.name.lower())
        items.append(item)
    if not items:
        raise RequestError(f"{path} holds no prompt; write one per line")
    return items


def read_prompts(path: Path) -> list[str | int]:
    """Read a file's prompts alone, as :func:`read_items` does; a row's name and seed mean nothing."""
    return [item.prompt for item in read_items(path, 0)]


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Go through a file's rows; raises RequestError where it cannot be read."""
    kind = path.suffix.lower()
    try:
        if not is_regular(path) or not path.exists():
            raise RequestError(f"{path} is not a file of prompts")
        if kind in (".parquet", ".json"):
            yield from _parquet(path) if kind == ".parquet" else _json(path)
            return
        if kind in (".csv", ".tsv"):
            yield from _table(path, "," if kind == ".csv" else "\t")
            return
        for number, line in enumerate(read_lines(path), 1):
            jsonl = kind in (".jsonl", ".ndjson")
            yield _object(line, number, path) if jsonl else {"prompt": line}
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"the prompts in {path} cannot be read ({why})") from None


def _table(path: Path, sign: str) -> Iterator[Mapping[str, Any]]:
    """Go through a table's rows, by the names in its first line; an empty cell is left out."""
    comma = sign == ","
    text = io.StringIO(read_text_file(path), newline="")
    rows = csv.DictReader(text, delimiter=sign, strict=comma, skipinitialspace=comma)
    for row in rows:
        if comma and None in row:
            raise RequestError(
                f"line {rows.line_num} of {path} has more cells than the first line has names; put "
                "prompts with a comma in quotes"
            )
        cells = {name: cell for name, cell in row.items() if name and cell}
        seed = cells.get("seed", "")
        yield cells | ({"seed": int(seed)} if seed.isdecimal() and len(seed) < 20 else {})


def _object(line: str, number: int, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(
            f"line {number} of {path} is not JSON; write one object per line"
        ) from None
    if isinstance(found, str):
        return {"prompt": found}
    if not isinstance(found, dict):
        raise RequestError(
            f'line {number} of {path} is not an object such as {{"prompt": "red heart"}}'
        )
    return found


def _json(path: Path) -> Iterable[Mapping[str, Any]]:
    found = read_json_file(path)
    if isinstance(found, dict) and isinstance(found.get("annotations"), list):
        found = found["annotations"]
    if not isinstance(found, list):
        raise RequestError(f"{path} holds neither COCO's annotations nor a list of prompts")
    return [one if isinstance(one, dict) else {"prompt": one} for one in found]


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise RequestError(
            f"reading {path} needs pyarrow; pip install 'lantern-accel[parquet]', or write JSONL"
        ) from None
    with parquet.ParquetFile(path) as table:
        names = [n for n in (*PROMPT_KEYS, *NAME_KEYS, "seed") if n in table.schema_arrow.names]
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=names):
            yield from batch.to_pylist()


def _item(row: Mapping[str, Any], number: int, seed: int, path: Path) -> Item:
    prompt = next((row[key] for key in PROMPT_KEYS if row.get(key) is not None), None)
    where = f"row {number + 1} of {path}"
    if not isinstance(prompt, str | int) or isinstance(prompt, bool) or not str(prompt).strip():
        raise RequestError(f"{where} has no prompt; name it prompt, text or caption")
    name = next((row[key] for key in NAME_KEYS if row.get(key) is not None), None)
    name = f"{number:06d}" if name is None else str(name)
    if not _SAFE.fullmatch(name):
        raise RequestError(
            f"{where} has the id {shown(name)}, which names no file; use letters, digits, '.', '_', '-'"
        )
    own = row.get("seed")
    if own is None:
        return Item(number, name, prompt, seed, number)
    if not isinstance(own, int) or isinstance(own, bool) or not 0 <= own < SEEDS:
        raise RequestError(f"{where} has the seed {shown(own)}; it is an integer from 0")
    return Item(number, name, prompt, own, 0)
