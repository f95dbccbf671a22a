"""The conformance kit on fewer cases and a smaller tree: every kind of strategy, and every family, once.

What the kit proves of every strategy and family runs in tests that are marked ``long``.
"""

from __future__ import annotations

import pytest

from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.testing import static, tiny

#: No drafts, a tree with a relaxed rule, a window: the first family's; the others decode by the tree.
KINDS = ("vanilla", "lantern++", "scd")
TREE = "0,1,00"
_cases = tiny.cases


def few_cases(*asked: tuple[str, ...], turn: int | None = None) -> list[tuple[str, str]]:
    """Return those of :func:`tiny.cases` that stand for the others; ``turn`` chooses no other."""
    found = _cases(*asked)
    first = found[0][0]
    return [case for case in found if case[1] in (KINDS if case[0] == first else KINDS[1:2])]


def small_tree(patch: pytest.MonkeyPatch) -> None:
    """Draft two levels of one and two codes in tiny engines: every loop over levels runs twice."""
    patch.setattr(tiny, "parse_drafts", lambda text: parse_drafts(TREE))


def small_kit(patch: pytest.MonkeyPatch) -> None:
    """Let the kit run the few cases, on the small tree."""
    patch.setattr(tiny, "cases", few_cases)
    # A window of 16 on an image of 36: its rings have gone round after 40 steps.
    patch.setattr(static, "LONG", 40)
    small_tree(patch)
