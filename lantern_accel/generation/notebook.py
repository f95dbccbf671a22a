"""Progress in a notebook: a bar with the time that is left, below the cell that generates."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any


def notebook() -> ModuleType | None:
    """Return IPython's display function where this process is a notebook's kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    # A terminal's shell has no kernel, and shows no HTML.
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from importlib import import_module

    return import_module("IPython.display")


def bar(
    display: ModuleType, now: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Return an ``on_progress`` that shows a bar by ``display``, IPython's module of that name."""
    began = now()
    handle: Any = None

    def report(done: int, total: int) -> None:
        nonlocal handle
        spent = now() - began
        left = spent / done * (total - done) if done else None
        when = "" if left is None else f", {_clock(left)} left"
        if done >= total:
            when = f" in {_clock(spent)}"
        page = display.HTML(
            f"<progress max='{total}' value='{done}'></progress> {done} of {total} tokens{when}"
        )
        if handle is None:
            handle = display.display(page, display_id=True)
        else:
            handle.update(page)

    return report


def _clock(seconds: float) -> str:
    """Write a time as people do: 8 s, 2:05 min, 1:02:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
