"""Pages of Markdown on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lantern_accel.cli.console import show_table


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
