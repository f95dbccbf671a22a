"""Gets what is open ready in a child of ``fork``, which has its parent's memory and not its threads."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Protocol


class Inherited(Protocol):
    """What a child of ``fork`` must get ready before it is used there."""

    def after_fork(self) -> None:
        """Get ready; called in the child, which has one thread; must not compute, and never raises."""


_known: weakref.WeakSet[Inherited] = weakref.WeakSet()
_with_torch = False


def report_in_children(one: Inherited) -> None:
    """Report something in every child of ``fork``, for as long as it lives."""
    _known.add(one)


def inherited_torch() -> bool:
    """Return whether this process was forked from one that had torch, whose threads are not here."""
    return _with_torch


def _in_child() -> None:
    global _with_torch
    _with_torch = _with_torch or "torch" in sys.modules
    for one in list(_known):
        one.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_in_child)
