"""What commands share: options of several numbers, and pages of Markdown on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress

from lantern_accel.cli.console import show_table
from lantern_accel.cli.options import words_of
from lantern_accel.errors import RequestError, plain


def whole_numbers(option: str, given: Sequence[str], least: int, most: int) -> list[int]:
    """Read a repeatable option of integers as :func:`numbers` does."""
    found = numbers(option, given, least, most)
    for one in found:
        if one != int(one):
            raise RequestError(f"{option} takes integers, such as 1,4, not {one:g}")
    return [int(one) for one in found]


def numbers(option: str, given: Sequence[str], least: float, most: float) -> list[float]:
    """Read a repeatable option of numbers, several with commas between, each kept once.

    Raises RequestError for anything that is none from ``least`` to ``most``.
    """
    found: dict[float, None] = {}
    for word in words_of(given) or given:
        number = math.nan
        with suppress(ValueError):
            number = float(word) if len(word) <= 64 and word.isascii() else number
        if not least <= number <= most:
            raise RequestError(
                f"{option} takes numbers from {plain(least)} to {plain(most)}, such as 0,1, not "
                f"{word[:40]!r}"
            )
        found[number] = None
    return list(found)


def show_markdown(text: str, narrow: Sequence[str] = ()) -> None:
    """Print Markdown: as it is into a pipe; on a terminal tables are laid out, and marks left out."""
    if not sys.stdout.isatty():
        print(text)
        return
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
            continue
        if len(block) > 2:
            head, _, *rows = ([cell.strip() for cell in one.split("|")[1:-1]] for one in block)
            show_table(head, rows, narrow)
        elif block:
            print("\n".join(block))
        block = []
        if line:  # without the marks of headings, emphasis and code
            plain = line.lstrip("#").strip().replace("**", "").replace("`", "")
            print(("\n" if line.startswith("#") else "") + plain)
