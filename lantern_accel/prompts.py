"""Files of prompts: plain lines, JSONL, tables, Parquet, and COCO's captions; one image per row."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import RequestError, show
from lantern_accel.files import check_name, is_regular, read_json_file, read_lines, read_text_file

#: Keys of a row that hold its prompt, name and seed; the first that is there counts.
PROMPT_KEYS = ("prompt", "text", "caption", "TEXT", "Prompt")
NAME_KEYS = ("id", "name", "key")
#: Rows of a Parquet file that are read at once.
ROWS_AT_ONCE = 4096
#: Characters of an id, at most.
LONGEST_ID = 100
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Item:
    """One image to generate: ``number`` in its file, ``name`` of what is written, and its random stream.

    A row with a seed of its own is image 0 of that seed; any other one is image ``number`` of the run's.
    ``error``: why the row cannot be used.
    """

    number: int
    name: str
    prompt: str | int
    seed: int
    index: int
    error: str = ""


def read_items(path: Path, seed: int) -> list[Item]:
    """Read a file's prompts; raises RequestError where there are none, or none that can be used.

    ``.jsonl``: an object per line with ``prompt`` (or ``text``, ``caption``), if wanted ``id`` and
    ``seed``. ``.parquet``, ``.csv`` and ``.tsv``: columns of these names, or PartiPrompts' ``Prompt``.
    ``.json``: COCO's captions (``annotations`` with ``caption`` and ``id``), or a list of such objects.
    Anything else: one prompt per line. Tables are separated by comma, semicolon or tab, as their first
    line is, or by what a line ``sep=;`` before it says.
    """
    items = _items(path, seed)
    names = Counter(item.name.lower() for item in items if not item.error)
    if not names:
        raise RequestError(f"row 1 of {path}: {items[0].error}")
    ((name, count),) = names.most_common(1)
    if count > 1:
        raise RequestError(
            f"{path} names two images {name!r}; give every row an id of its own, or none"
        )
    return items


def read_prompts(path: Path) -> list[str | int]:
    """Read a file's prompts alone, as :func:`read_items` does; a row's name and seed mean nothing."""
    found = _items(path, 0)
    if bad := next((item for item in found if item.prompt == ""), None):
        raise RequestError(f"row {bad.number + 1} of {path}: {bad.error}")
    return [item.prompt for item in found]


def _items(path: Path, seed: int) -> list[Item]:
    found = [_item(row, number, seed) for number, row in enumerate(_rows(path))]
    if not found:
        raise RequestError(f"{path} holds no prompt; write one per line")
    return found


def _rows(path: Path) -> Iterator[Mapping[str, object]]:
    """Go through a file's rows; raises RequestError where it cannot be read."""
    kind = path.suffix.lower()
    try:
        if not is_regular(path) or not path.exists():
            raise RequestError(f"{path} is not a file of prompts; check the path")
        readers = {".parquet": _parquet, ".json": _json, ".csv": _table, ".tsv": _table}
        if kind in readers:
            yield from readers[kind](path)
            return
        jsonl = kind in (".jsonl", ".ndjson")
        for number, line in enumerate(read_lines(path), 1):
            if line:
                yield _object(line, number, path) if jsonl else {"prompt": line}
    except (OSError, ValueError, csv.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise RequestError(f"the prompts in {path} cannot be read ({why})") from None


def _table(path: Path) -> Iterator[Mapping[str, object]]:
    """Go through a table's rows, by the names in its first line; an empty cell is left out."""
    whole = read_text_file(path).replace("\r", "\n")
    text = whole.lstrip("\n ")
    signs = "\t,;" if path.suffix.lower() == ".tsv" else ",;\t"
    if separator := re.match('"?sep=(.)"?[,; ]*(\n[\n ]*|$)', text, re.IGNORECASE):
        text, signs = text[separator.end() :], separator[1]
    first = text.partition("\n")[:1]
    for sign in signs:
        names = [name.strip().lower() for name in next(csv.reader(first, delimiter=sign), ())]
        if not {*PROMPT_KEYS}.isdisjoint(names):
            break
    else:
        raise RequestError(
            f"the first line of {path} names no column prompt, text or caption; separate its names by "
            "a comma, a semicolon or a tab"
        )
    tab, start = sign == "\t", whole.count("\n") - text.count("\n") + 1
    lines = re.findall("[^\n]*\n|[^\n]+", text)
    rows = csv.reader(iter(lines), delimiter=sign, strict=not tab, skipinitialspace=not tab)
    next(rows)
    while (at := rows.line_num) < len(lines):
        try:
            row = next(rows)
            # Several lines in quotes: a table with tabs may have an open one.
            if rows.line_num > at + 1:
                list(csv.reader(lines[at : rows.line_num], delimiter=sign, strict=True))
        except csv.Error as error:
            raise RequestError(
                f"line {start + at} of {path} cannot be read ({error}); close the quote that it opens, "
                "and write one within quotes twice"
            ) from None
        if any(row[len(names) :]) and not tab:
            raise RequestError(
                f"line {start + at} of {path} has more cells than the first line has names; put "
                f"prompts with {sign!r} in quotes"
            )
        cells = {name: cell for name, cell in zip(names, row, strict=False) if name and cell}
        number = re.fullmatch(r" *([0-9]{1,19})([.,](?!000\b)0*)? *", cells.get("seed", ""))
        if any(map(str.strip, row)):
            yield cells | ({"seed": int(number[1])} if number else {})


def _object(line: str, number: int, path: Path) -> Mapping[str, object]:
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


def _json(path: Path) -> Iterable[Mapping[str, object]]:
    found = read_json_file(path)
    if isinstance(found, dict) and isinstance(found.get("annotations"), list):
        found = found["annotations"]
    if not isinstance(found, list):
        raise RequestError(f"{path} holds neither COCO's annotations nor a list of prompts")
    return [one if isinstance(one, dict) else {"prompt": one} for one in found]


def _parquet(path: Path) -> Iterator[Mapping[str, object]]:
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


def _item(row: Mapping[str, object], number: int, seed: int) -> Item:
    """Return a row's image, or what is wrong with the row; its prompt is "" where there is none."""
    row = {key: one for key, one in row.items() if one is not None and one == one}  # not NaN
    prompt = next((row[key] for key in PROMPT_KEYS if key in row), "")
    name = str(next((row[key] for key in NAME_KEYS if key in row), f"{number:06d}"))
    own = row.get("seed")
    if isinstance(own, float) and own.is_integer():
        own = int(own)
    error = _wrong(name, own)
    if not isinstance(prompt, str | int) or isinstance(prompt, bool) or not str(prompt).strip():
        prompt, error = "", "it has no prompt; name it prompt, text or caption"
    if isinstance(own, int):
        return Item(number, name, prompt, own, 0, error)
    return Item(number, name, prompt, seed, number, error)


def _wrong(name: str, seed: object) -> str:
    """Return what is wrong with a row's id and seed; "" where nothing is."""
    if len(name) > LONGEST_ID:
        return f"its id {name[:20]!r}... has {len(name)} characters, and {LONGEST_ID} are the most"
    if not _SAFE.fullmatch(name):
        return (
            f"it has the id {show(name)}, which names no file; use letters, digits, '.', '_', '-', "
            "and one of the first two to begin with"
        )
    try:
        check_name(name)
    except RequestError as error:
        return f"its id {error}"
    if seed is None or (type(seed) is int and 0 <= seed < SEEDS):
        return ""
    return f"it has the seed {show(seed)}, and a seed is an integer from 0 to {SEEDS - 1}"
