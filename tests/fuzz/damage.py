"""Damage to files, field by field for JSON and TOML, tensor by tensor for weights, else byte by byte.

An edit is plain data, so that a case that failed can be kept and replayed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

#: What takes the place of a field; ``delete`` removes it, ``double`` repeats it in its list.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 48, 64, 10**6, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, 5.0, "NaN!",
    "Infinity!", "", "²", "a", "x" * 3000, "../../x", "/dev/zero", [], {}, [[]], [None], {"a": 1}, [1, 2],
    "delete!", "double!", "nest!", "digits!",
)  # fmt: skip
TENSORS = (
    "nan", "inf", "huge", "tiny", "zero", "random", "wide", "half", "integers", "absent", "renamed",
    "keys",    "tuple keys", "scalar",
)  # fmt: skip
#: Contents in place of a file's own, and what may stand somewhere in it.
CONTENTS = ("", "{}", "[]", "null", "[" * 20000, "PK\x03\x04", "version https://git-lfs", "\x80\x02", "é",
            "1" * 5000)  # fmt: skip
INSERTS = ("0", "{", "\x00", "9" * 5000)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where every value stands within another; of a list only the first three."""
    found = [at] if at else []
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value[:3])
        for key, below in items:
            found += paths(below, (*at, key))
    return found


def json_edits(base: Path) -> st.SearchStrategy[list[Any]]:
    """Return edits of a JSON file: where, and what stands there afterwards."""
    places = paths(json.loads(base.read_text(encoding="utf-8")))
    one = st.tuples(st.sampled_from(places), st.sampled_from(VALUES)).map(
        lambda pair: [list(pair[0]), pair[1]]
    )
    return st.lists(one, min_size=1, max_size=2)


BYTES = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)).map(list),
    st.tuples(st.just("flip"), st.floats(0, 0.999), st.integers(1, 255)).map(list),
    st.tuples(st.just("insert"), st.floats(0, 1), st.sampled_from(INSERTS)).map(list),
    st.tuples(st.just("be"), st.sampled_from(CONTENTS)).map(list),
)


def apply_json(base: Path, edits: list[Any]) -> str:
    """Return a JSON file's text with edits made."""
    value = json.loads(base.read_text(encoding="utf-8"))
    for path, new in edits:
        at = value
        try:
            for key in path[:-1]:
                at = at[key]
            if new == "delete!":
                del at[path[-1]]
            elif new == "double!" and isinstance(at, list):
                at.insert(path[-1], at[path[-1]])
            else:
                at[path[-1]] = copy.deepcopy(new)  # a second edit must not change what is drawn
        except (LookupError, TypeError):  # an edit before it took the place away
            continue
    text = json.dumps(value)
    for mark, put in (("NaN!", "NaN"), ("Infinity!", "Infinity"), ("digits!", "9" * 5000),
                      ("nest!", "[" * 5000 + "]" * 5000)):  # fmt: skip
        text = text.replace(f'"{mark}"', put)
    return text


def apply_bytes(whole: bytes, edit: list[Any]) -> bytes:
    """Return bytes with one edit made."""
    kind, *rest = edit
    if kind == "be":
        return str(rest[0]).encode("utf-8", "surrogateescape")
    at = int(rest[0] * len(whole))
    if kind == "cut":
        return whole[:at]
    if kind == "flip":
        at = min(at, len(whole) - 1)
        return whole[:at] + bytes([whole[at] ^ rest[1]]) + whole[at + 1 :]
    return whole[:at] + str(rest[1]).encode() + whole[at:]


def apply_tensors(base: Path, out: Path, edit: list[Any]) -> None:
    """Write a checkpoint with one tensor damaged; ``.pt`` where keys are no text."""
    import torch
    from safetensors.torch import load_file, save_file

    number, kind = edit
    tensors: dict[Any, Any] = load_file(base)
    name = sorted(tensors)[number % len(tensors)]
    values = tensors[name]
    fill = {"nan": float("nan"), "inf": float("inf"), "huge": 3e38, "tiny": 1e-44, "zero": 0.0}
    if kind in fill:
        tensors[name] = torch.full_like(values, fill[kind])
    elif kind == "random":
        tensors[name] = torch.randn(values.shape) * 1e20
    elif kind == "wide":
        tensors[name] = torch.cat([values.reshape(-1)] * 2)
    elif kind == "half":
        tensors[name] = values.half()
    elif kind == "integers":
        tensors[name] = values.char()
    elif kind == "scalar":
        tensors[name] = values.reshape(-1)[0].clone()
    elif kind == "absent":
        del tensors[name]
    elif kind == "renamed":
        tensors[name + ".x"] = tensors.pop(name)
    else:
        tensors[5 if kind == "keys" else (1, "a")] = tensors.pop(name)
        torch.save(tensors, out)
        return
    save_file({k: v.contiguous() for k, v in tensors.items()}, out)
