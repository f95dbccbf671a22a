"""Names that a bundled model was trained on, and what a prompt has that is none of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lantern_accel.errors import RequestError
from lantern_accel.models.bundle import bundled_models

#: Words that say how something is drawn or where it is, and what prompts are built with.
GLUE = {"a", "an", "the", "of", "on", "in", "with", "and", "emoji", "icon", "picture", "style"}
GLUE |= {"fluent", "noto", "twemoji", "openmoji", "flat", "3d", "modern"}


def taught(model: str) -> list[str]:
    """Return the prompts that a bundled model was trained on, the most frequent first.

    Raises :class:`RequestError` for a model of which they are not known.
    """
    path = bundled_models().get(model)
    if path is None or not (path / "prompts.txt").is_file():
        raise RequestError(
            f"the training prompts of {model!r} are not known; name a bundled model, such as "
            "lantern-emoji"
        )
    return (path / "prompts.txt").read_text(encoding="utf-8").splitlines()


def unseen(prompts: Iterable[object], names: list[str]) -> dict[str, list[str]]:
    """Return the words of prompts that are in none of ``names``, each with at most three near names."""
    known = {word for name in names for word in name.split()} | GLUE
    words = dict.fromkeys(word for one in prompts for word in str(one).lower().split())
    return {
        word: [
            *dict.fromkeys(
                next(name for name in names if near in name.split())
                for near in difflib.get_close_matches(word, known - GLUE, n=3, cutoff=0.7)
            )
        ]
        for word in words
        if word.strip(".,!?\"'") not in known
    }
