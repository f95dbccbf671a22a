"""Lets graphs of the software HPU fail as a card's do: later, elsewhere, and more than once.

The bridge lowers, compiles and launches in threads. What fails there is lost, and each thread keeps an
error until somebody waits for the device or gives it more work. Nothing fails unless a test plants it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: What Synapse says of a graph that it cannot compile.
REFUSED = "Graph compile failed. synStatus=synStatus 26 [Generic failure]. "


@dataclass
class Planted:
    """Runs of one function's graph that are lost: from the ``first`` one on, counted from 1, or that one.

    ``errors``: threads that keep one; ``at_launch``: they come where more work is given, too, else at a
    wait only.
    """

    function: str
    first: int = 1
    errors: int = 1
    at_launch: bool = False
    always: bool = True
    text: str = REFUSED
    runs: int = 0


_planted: list[Planted] = []


def plant(function: str, **how: int | bool | str) -> Planted:
    """Let runs of a function's graph fail, by its name in ``capture`` (``HPUGraph``, ``replay``)."""
    made = Planted(function, **how)  # type: ignore[arg-type]  # a test's own words
    _planted.append(made)
    return made


def clear() -> None:
    """Plant nothing from now on; what is on its way still comes."""
    _planted.clear()


def count_run(function: str) -> str:
    """Count a run; return the error's text where its work is lost, and let the errors come."""
    for one in _planted:
        if one.function != function:
            continue
        one.runs += 1
        if one.runs == one.first or (one.always and one.runs > one.first):
            torch.ops.lantern_software_hpu.fail_later(one.text, one.at_launch, one.errors)
            return one.text
    return ""
