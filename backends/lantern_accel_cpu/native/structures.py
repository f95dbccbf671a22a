"""The structures of ``native.h`` as ctypes has them, read from the header itself."""

from __future__ import annotations

import re
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Any

from lantern_accel_cpu.native.build import HERE

_NUMBERS: dict[str, Any] = {
    "float": c_float, "int32_t": c_int32, "int64_t": c_int64, "uint8_t": c_uint8,
}  # fmt: skip
#: Those that were read, by name: a structure may hold one that stands above it.
_KNOWN: dict[str, type[Structure]] = {}


@cache
def _bodies() -> dict[str, str]:
    """Return what stands between the braces of every structure, without comments."""
    text = re.sub(r"//[^\n]*", "", (HERE / "native.h").read_text())
    return dict(re.findall(r"^struct (\w+) \{(.*?)^\};", text, flags=re.MULTILINE | re.DOTALL))


def fields(name: str) -> list[tuple[str, Any]]:
    """Return a structure's fields in order: numbers, structures, and addresses.

    A pointer to a structure of ours is a pointer to it, any other one an integer (``data_ptr``).
    """
    found: list[tuple[str, Any]] = []
    for declared in filter(None, map(str.strip, _bodies()[name].split(";"))):
        match = re.fullmatch(r"(?:const\s+)?(\w+)\b(.*)", declared, flags=re.DOTALL)
        assert match is not None, declared
        kind, variables = match.groups()
        for variable in variables.split(","):
            last = re.search(r"(\w+)\s*$", variable)
            assert last is not None, declared
            stars = variable.count("*")
            value = _KNOWN.get(kind) or _NUMBERS.get(kind)
            if stars:
                value = POINTER(_KNOWN[kind]) if stars == 1 and kind in _KNOWN else c_void_p
            assert value is not None, declared
            found.append((last[1], value))
    return found


class Cache(Structure): ...


class Mask(Structure): ...


class Linear(Structure): ...


class Attend(Structure): ...


class Rotary(Structure): ...


class RotateWrite(Structure): ...


class Block(Structure): ...


class Trunk(Structure): ...


class WindowPass(Structure): ...


class Filter(Structure): ...


class Guide(Structure): ...


class Rule(Structure): ...


class Accept(Structure): ...


class Choose(Structure): ...


class TreeStep(Structure): ...


class Advance(Structure): ...


class GuessHead(Structure): ...


class AdvanceChosen(Structure): ...


class Copy(Structure): ...


for one in (
    Cache, Mask, Linear, Attend, Rotary, RotateWrite, Block, Trunk, WindowPass, Filter, Guide, Rule,
    Accept, Choose, TreeStep, Advance, GuessHead, AdvanceChosen, Copy,
):  # fmt: skip
    one._fields_ = fields(one.__name__)
    _KNOWN[one.__name__] = one
