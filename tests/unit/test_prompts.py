"""Files of prompts: every format, and every way that one can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lantern_accel.errors import RequestError
from lantern_accel.prompts import Item, read_items, read_prompts


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


ROWS = [{"prompt": "red heart"}, {"caption": "pizza", "image_id": 4}]
PLAIN = [Item(0, "000000", "red heart", 5, 0), Item(1, "000001", "pizza", 5, 1)]
COMMA = [Item(0, "a", "heart,\nred", 9, 0), Item(1, "000001", "pizza", 5, 1)]
NAMED = [Item(0, "a", "fox", 5, 0), Item(1, "b", "ant", 5, 1)]
OWN = '[{"text": "fox", "id": 37, "seed": 3.0}, {"prompt": 3, "seed": NaN, "id": NaN, "key": "c"}]'
#: A file's name and text, and its items for the seed 5.
FILES: list[tuple[str, str, list[Item]]] = [
    ("a.txt", "red heart\n\n pizza \n", PLAIN),
    ("a.jsonl", "\n".join(map(json.dumps, ROWS)), PLAIN),
    ("a.json", json.dumps(ROWS), PLAIN),
    ("a.json", json.dumps({"annotations": ROWS, "images": []}), PLAIN),
    ("a.json", OWN, [Item(0, "37", "fox", 3, 0), Item(1, "c", 3, 5, 1)]),
    ("a.csv", '\ufeffprompt, seed, id\r\n"heart,\nred", 9, a\r\npizza, , ', COMMA),
    ("a.tsv", '\ufeffprompt\tseed\tid\r\n"heart,\nred"\t9\ta\r\npizza\t\t', COMMA),
    # Empty lines and cells of a table are passed over.
    ("a.csv", "\n \nprompt,id\nfox,a\nant,b\n", NAMED),
    ("a.csv", "sep=,\n\nprompt,id\nfox,a\nant,b\n", NAMED),
    ("a.csv", ",prompt,id\n0,fox,a\n1,ant,b\n", NAMED),
    ("a.csv", "prompt,id\nfox,a\n,\n  \nant,b\n , \n", NAMED),
    ("a.csv", "prompt,id\nfox,a,,\nant,b,\n", NAMED),
]


@pytest.mark.parametrize(("name", "text", "items"), FILES)
def test_every_format_says_the_same(tmp_path, name, text, items):
    assert read_items(written(tmp_path / name, text), 5) == items


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\v", "\f"])
def test_only_the_end_of_a_line_ends_a_prompt(tmp_path, sign):
    for name, text in (
        ("a.txt", f"red{sign}heart\r\nfox"),
        ("a.csv", f"prompt\nred{sign}heart\nfox"),
    ):
        (path := tmp_path / name).write_text(text, encoding="utf-8")
        assert read_prompts(path) == [f"red{sign}heart", "fox"]
    if sign not in "\v\f":  # which JSON has no line with
        (path := tmp_path / "a.jsonl").write_text(
            f'{{"prompt": "red{sign}heart"}}\n', encoding="utf-8"
        )
        assert read_prompts(path) == [f"red{sign}heart"]


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be-mark"])
@pytest.mark.parametrize(
    "text",
    [
        'prompt,seed,id\n"a fox; sitting",3.0,a\nf\u00fcchse,,\n',
        'sep=,\nprompt,seed,id\n"a fox; sitting",3,a\nf\u00fcchse,,\n',
        'id;Prompt;seed\na;"a fox; sitting";3,0\n;f\u00fcchse;\n',
        '"sep=;"\nid;prompt;seed\na;"a fox; sitting";3.00\n;f\u00fcchse;\n',
        '"id";"prompt";"seed"\n"a";"a fox; sitting";"3."\n"";"f\u00fcchse";""\n',
        "SEP=\t\nid\tprompt\tseed\na\ta fox; sitting\t3\n\tf\u00fcchse\t\n",
        "seed\tid\tTEXT\n3.0\ta\ta fox; sitting\n\t\tf\u00fcchse\n",
        "ID\tSeed\tPROMPT\ra\t3\ta fox; sitting\r\t\tf\u00fcchse\r",
        "sep=|\r\nid|caption|seed\r\na|a fox; sitting|3\r\n\r\n|f\u00fcchse|\r\n",
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_is_read_as_spreadsheets_write_it(tmp_path, suffix, text, coding):
    marked = coding.endswith("-mark")
    held = ("\ufeff" * marked + text).encode(coding.removesuffix("-mark"))
    (path := tmp_path / f"a{suffix}").write_bytes(held)
    assert read_items(path, 5) == [
        Item(0, "a", "a fox; sitting", 3, 0),
        Item(1, "000001", "f\u00fcchse", 5, 1),
    ]


def test_a_row_that_is_lost_takes_no_name_from_another(tmp_path):
    bad, good = read_items(written(tmp_path / "a.csv", "prompt,id,seed\nfox,a,-1\nant,A,2"), 5)
    assert bad.error and good == Item(1, "A", "ant", 2, 0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": "x" * 101}, "has 101 characters, and 100 are the most"),
        ({"id": "CON"}, "Windows.*CON"),
        ({"id": "nul.txt"}, "Windows.*nul"),
        ({"id": "Com1.a.b"}, "Windows.*Com1"),
        ({"id": "a."}, "Windows"),
        ({"id": "a b "}, "names no file"),
        *(({"id": f"a{sign}b"}, "names no file") for sign in '<>:"|?*'),
        ({"seed": 3.5}, "the seed 3.5"),
        ({"seed": True}, "the seed True"),
        ({"seed": [1]}, r"the seed \[1\]"),
        ({"seed": 2**63}, r"the seed 9\d{18}, .* from 0 to 9\d{18}"),
        ({"prompt": ""}, "has no prompt"),
    ],
)
def test_a_row_that_cannot_be_used_is_lost_alone(tmp_path, row, says):
    rows = [{"prompt": "fox", **row}, {"prompt": "ant", "id": "console"}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    bad, good = read_items(path, 5)
    assert re.search(says, bad.error) and bad.number == 0
    assert good == Item(1, "console", "ant", 5, 1)
    if "prompt" in row:
        with pytest.raises(RequestError, match=r"row 1 .* has no prompt"):
            read_prompts(path)
    else:  # of which ids and seeds mean nothing
        assert read_prompts(path) == ["fox", "ant"]
        path.write_text(f"{json.dumps(rows[0])}\n" * 2)
        assert read_prompts(path) == ["fox", "fox"]


@pytest.mark.parametrize(
    "held", ["prompt\nf\u00fcchse".encode("latin-1"), "prompt\nfox".encode("utf-16-le")]
)
@pytest.mark.parametrize("suffix", [".csv", ".txt", ".json"])
def test_another_encoding_is_named(tmp_path, held, suffix):
    (path := tmp_path / f"a{suffix}").write_bytes(held)
    with pytest.raises(RequestError, match="save it as UTF-8"):
        read_items(path, 5)


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
        ("a.jsonl", '{"prompt": "x"}\n\n \r{', "line 4 .* is not JSON"),
        ("a.jsonl", "3", "not an object such as"),
        ("a.jsonl", '{"words": "x"}', "row 1 .* has no prompt"),
        ("a.jsonl", '{"prompt": " "}', "has no prompt"),
        ("a.jsonl", '{"prompt": "x", "seed": "1"}', "the seed '1'"),
        ("a.csv", "prompt,seed\nx,-1", "the seed '-1'"),
        ("a.csv", 'prompt,seed\nx,"1,000"', "the seed '1,000'"),
        ("a.csv", 'prompt;seed\nx;"1.000 "', "the seed '1.000 '"),
        (
            "a.csv",
            "words\nx",
            "first line .* column prompt, text or caption; .* semicolon or a tab",
        ),
        ("a.csv", "prompt|seed\nx|1", "first line .* column prompt"),
        ("a.csv", "sep=;\nprompt,seed\nx,1", "first line .* column prompt"),
        ("a.csv", "id;prompt\n1;a fox; sitting", "line 2 .* has more cells .* ';' in quotes"),
        ("a.csv", "prompt\na fox, sitting", "line 2 .* has more cells .* in quotes"),
        ("a.csv", 'prompt,seed\ndog,4\n"open,5\ncat,6', "line 3 .* cannot be read .* quote"),
        ("a.csv", '\nsep=,\nprompt\n"open\n"cat"', "line 4 .* cannot be read"),
        ("a.tsv", 'prompt\tseed\ndog\t4\n"open\t5\ncat\t6', "line 3 .* cannot be read .* quote"),
        ("a.tsv", 'prompt\n"open\ndog\n"cat" x', "line 2 .* cannot be read"),
        ("a.csv", f"prompt\n{'x' * 200_000}", "cannot be read .*limit"),
        ("a.csv", f"prompt,seed\nx,{'9' * 5000}", "row 1 .* has the seed"),
        ("a.jsonl", '{"prompt": "x", "id": "../x"}', "names no file"),
        ("a.jsonl", '{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "A"}', "two images 'a'"),
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
