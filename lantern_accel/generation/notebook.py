"""Progress in a notebook: tqdm's bar with the time that is left, below the cell that generates."""

from __future__ import annotations

import sys
from collections.abc import Callable


def notebook_bar() -> Callable[[int, int], None] | None:
    """Return an ``on_progress`` that shows a bar where this process is a notebook's kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:  # a terminal's shell has none
        return None
    from tqdm.std import tqdm  # as text, which every notebook shows; widgets need another package

    shown: tqdm | None = None

    def report(done: int, total: int) -> None:
        nonlocal shown
        shown = shown or tqdm(total=total, unit=" tokens")
        shown.update(done - shown.n)
        if done >= total:
            shown.close()

    return report
