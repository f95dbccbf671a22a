"""The structures of ``native.h`` and the functions of ``api.cpp``, as ctypes has them."""

from __future__ import annotations

import re
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_void_p,
)  # fmt: skip
from typing import Any

from lantern_accel_cpu.native.build import HERE

_KINDS: dict[str, Any] = {
    "void": None, "int": c_int, "float": c_float, "int32_t": c_int32, "int64_t": c_int64,
    "uint8_t": c_uint8,
}  # fmt: skip
#: The structures by name, in the header's order: one may hold another that stands above it.
STRUCTURES: dict[str, type[Structure]] = {}


def _kind_of(name: str, stars: int) -> Any:
    """Return a type's kind: a pointer to a structure or a text, any other address as an integer."""
    if stars == 1 and name in STRUCTURES:
        return POINTER(STRUCTURES[name])
    if stars:
        return c_char_p if name == "char" else c_void_p
    return STRUCTURES.get(name) or _KINDS[name]


def _declared(text: str) -> list[tuple[str, Any]]:
    """Return the name and kind of each variable of a declaration such as ``const float *a, *b``."""
    match = re.fullmatch(r"(?:const\s+)?(\w+)\b(.*)", text.strip(), flags=re.DOTALL)
    assert match is not None, text
    variables = (re.sub(r"\bconst\b", "", one) for one in match[2].split(","))
    return [(one.strip(" *\n"), _kind_of(match[1], one.count("*"))) for one in variables]


def _read_structures() -> None:
    text = re.sub(r"//[^\n]*", "", (HERE / "native.h").read_text())
    found = re.findall(r"^struct (\w+) \{(.*?)^\};", text, flags=re.MULTILINE | re.DOTALL)
    for name, body in found:
        if "(" not in body:  # the others are the library's own
            parts = filter(None, map(str.strip, body.split(";")))
            fields = [one for part in parts for one in _declared(part)]
            STRUCTURES[name] = type(name, (Structure,), {"_fields_": fields})


def list_functions() -> dict[str, tuple[Any, list[Any]]]:
    """Return what each function of the library returns and takes, without the prefix ``lantern_``."""
    text = (HERE / "api.cpp").read_text()
    found = re.findall(r"^EXPORT ([^(]*?)lantern_(\w+)\((.*?)\)", text, re.MULTILINE | re.DOTALL)
    return {
        name: (_declared(result)[0][1], [_declared(one)[0][1] for one in given.split(",") if one])
        for result, name, given in found
    }


def __getattr__(name: str) -> type[Structure]:
    try:
        return STRUCTURES[name]
    except KeyError:
        raise AttributeError(name) from None


_read_structures()
