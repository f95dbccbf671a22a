"""The one text normalisation, used in training and at every request; imports nothing heavy."""

from __future__ import annotations

import re
import unicodedata

_NOT_WORD = re.compile(r"[^\w]+|_+")


def normalise(text: str) -> str:
    """Return ``text`` in NFKC, lower case, with every run of non-word characters as one space."""
    # The typographic apostrophe is meant: emoji names use it.
    lowered = unicodedata.normalize("NFKC", text).lower().replace("’", "").replace("'", "")  # noqa: RUF001
    return _NOT_WORD.sub(" ", lowered).strip()
