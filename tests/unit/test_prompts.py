"""Files of prompts: every format, and every way that one can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lantern_accel.errors import RequestError
from lantern_accel.prompts import Item, read_items


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_lines_and_jsonl_and_coco_say_the_same(tmp_path):
    lines = written(tmp_path / "a.txt", "red heart\n\n pizza \n")
    rows = [{"prompt": "red heart"}, {"caption": "pizza", "image_id": 4}]
    jsonl = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    listed = written(tmp_path / "a.json", json.dumps(rows))
    coco = written(tmp_path / "c.json", json.dumps({"annotations": rows, "images": []}))
    expected = [Item(0, "000000", "red heart", 5, 0), Item(1, "000001", "pizza", 5, 1)]
    for path in (lines, jsonl, listed, coco):
        assert read_items(path, 5) == expected


def test_ids_name_files_and_seeds_stand_for_themselves(tmp_path):
    rows = [{"text": "pizza", "id": 37, "seed": 9}, {"prompt": 3, "key": "three"}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_items(path, 5) == [Item(0, "37", "pizza", 9, 0), Item(1, "three", 3, 5, 1)]


def test_tables_have_ids_and_seeds_and_cells_with_commas(tmp_path):
    rows = [("prompt", "seed", "id"), ('"heart,\nred"', "9", "a"), ("pizza", "", "")]
    expected = [Item(0, "a", "heart,\nred", 9, 0), Item(1, "000001", "pizza", 5, 1)]
    for suffix, sign in ((".csv", ", "), (".tsv", "\t")):
        path = written(tmp_path / f"a{suffix}", "\ufeff" + "\r\n".join(map(sign.join, rows)))
        assert read_items(path, 5) == expected


def test_parquet_is_read_by_its_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"TEXT": ["pizza", "fish"], "seed": [1, None], "url": ["", ""]})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = read_items(tmp_path / "a.parquet", 5)
    assert found == [Item(0, "000000", "pizza", 1, 0), Item(1, "000001", "fish", 5, 1)]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(RequestError, match=r"b\.parquet cannot be read"):
        read_items(tmp_path / "b.parquet", 5)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2 .* is not JSON"),
        ("a.jsonl", "3", "not an object such as"),
        ("a.jsonl", '{"words": "x"}', "row 1 .* has no prompt"),
        ("a.jsonl", '{"prompt": " "}', "has no prompt"),
        ("a.jsonl", '{"prompt": "x", "seed": -1}', "the seed -1"),
        ("a.jsonl", '{"prompt": "x", "seed": "1"}', "the seed '1'"),
        ("a.csv", "prompt,seed\nx,-1", "the seed '-1'"),
        ("a.csv", "words\nx", "row 1 .* has no prompt"),
        ("a.csv", "prompt\na fox, sitting", "line 2 .* has more cells .* in quotes"),
        ("a.csv", 'prompt,seed\n"open,5\ncat,6', "cannot be read"),
        ("a.csv", f"prompt\n{'x' * 200_000}", "cannot be read .*limit"),
        ("a.csv", f"prompt,seed\nx,{'9' * 5000}", "row 1 .* has the seed"),
        ("a.jsonl", '{"prompt": "x", "id": "../x"}', "names no file"),
        ("a.jsonl", '{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "A"}', "two images 'A'"),
        ("a.json", '{"images": []}', "neither COCO"),
        ("a.json", "{", "cannot be read"),
    ],
)
def test_what_is_wrong_is_told_with_its_row(tmp_path, name, text, says):
    with pytest.raises(RequestError, match=says):
        read_items(written(tmp_path / name, text), 0)


def test_a_file_that_is_not_there_is_told(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(RequestError, match="is not a file of prompts"):
            read_items(path, 0)
