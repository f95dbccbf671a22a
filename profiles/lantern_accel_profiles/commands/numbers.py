"""Options of several numbers: repeated, or with commas between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from lantern_accel.bounds import whole
from lantern_accel.cli.options import words_of
from lantern_accel.errors import RequestError, plain

Number = TypeVar("Number", int, float)


def whole_numbers(option: str, given: Sequence[str], least: int, most: int) -> list[int]:
    """Read a repeatable option of integers, several with commas between, each kept once.

    Raises RequestError for anything that is none from ``least`` to ``most``.
    """
    wanted = f"numbers from {least} to {most}, such as 1,4"
    return _numbers(option, given, lambda word: whole(word, least, most), wanted)


def numbers(option: str, given: Sequence[str], least: float, most: float) -> list[float]:
    """Read a repeatable option of numbers, several with commas between; raises as above."""

    def read(word: str) -> float | None:
        with suppress(ValueError):
            if len(word) <= 64 and word.isascii() and least <= (number := float(word)) <= most:
                return number
        return None

    return _numbers(
        option, given, read, f"numbers from {plain(least)} to {plain(most)}, such as 0,1"
    )


def _numbers(
    option: str, given: Sequence[str], read: Callable[[str], Number | None], wanted: str
) -> list[Number]:
    found: dict[Number, None] = {}
    for word in words_of(given):
        if (number := read(word)) is None:
            raise RequestError(f"{option} takes {wanted}, not {word[:40]!r}")
        found[number] = None
    return list(found)
