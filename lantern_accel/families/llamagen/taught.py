"""What a captioned model was trained on: names of things, their emoji, and words that mean them."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from pathlib import Path

from lantern_accel.errors import LanternWarning
from lantern_accel.families.llamagen.words import normalise

#: Words that name a style or a place, or connect others in a prompt.
GLUE = {"a", "an", "the", "of", "on", "in", "with", "and", "emoji", "icon", "picture", "style"}
GLUE |= {"fluent", "noto", "twemoji", "openmoji", "flat", "3d", "modern"}
#: Words of a prompt that are looked up: about as many as a model of this kind reads.
MOST_WORDS = 16
#: The sign that asks for the coloured form of an emoji; texts write it or leave it out.
COLOURED = "\ufe0f"


class Taught:
    """Reads ``prompts.txt`` (a name per line, the most frequent first) and ``emoji.tsv`` of a folder.

    A line of ``emoji.tsv`` has an emoji, its name and words of near meaning. Without these files
    nothing is known, and nothing is replaced or warned of.
    """

    def __init__(self, folder: Path) -> None:
        self.names = _lines(folder / "prompts.txt")
        rows = [line.split("\t") for line in _lines(folder / "emoji.tsv")]
        self._emoji = {sign: name for sign, name, _ in rows}
        self._words = {word for name in self.names for word in normalise(name).split()} | GLUE
        self._meaning: dict[str, list[str]] = {}
        for _, name, tags in rows:
            for word in {*name.split(), *tags.split(",")} - {""}:
                self._meaning.setdefault(word, []).append(name)

    def name_emoji(self, prompt: str) -> str:
        """Return the prompt with each known emoji replaced by its name."""
        if prompt.isascii():
            return prompt
        text = prompt.replace(COLOURED, "")
        for sign in sorted(self._emoji.keys() & _parts(text), key=len, reverse=True):
            text = text.replace(sign, f" {self._emoji[sign]} ")
        return text

    def unseen(self, prompts: Iterable[str]) -> dict[str, list[str]]:
        """Return words that no name has, each with at most three names near in meaning, else spelling."""
        if not self.names:
            return {}
        read = (word for one in prompts for word in normalise(one).split()[:MOST_WORDS])
        words = dict.fromkeys(read)
        return {word: self._near(word) for word in words if word not in self._words}

    def _near(self, word: str) -> list[str]:
        known = self._meaning
        stem = max(
            (one for one in known if len(one) > 4 and word.startswith(one)), key=len, default=""
        )
        if found := known.get(word) or known.get(word.removesuffix("s")) or known.get(stem):
            return found[:3]
        near = difflib.get_close_matches(word, self._words - GLUE, n=3, cutoff=0.8)
        return [
            *dict.fromkeys(
                next(n for n in self.names if one in normalise(n).split()) for one in near
            )
        ]

    def warn(self, prompts: Iterable[str]) -> None:
        """Give a :class:`LanternWarning` for each word that the model was not trained on."""
        for word, near in self.unseen(prompts).items():
            names = f"; near names: {', '.join(near)}" if near else ""
            warnings.warn(
                f"the model was not trained on the word {word!r}, and its image will not show it{names}; "
                "`lantern-accel models prompts` lists all names",
                LanternWarning,
                stacklevel=2,
            )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _parts(text: str, longest: int = 8) -> set[str]:
    """Return all substrings of at most ``longest`` characters: an emoji may have several."""
    return {text[at : at + n] for at in range(len(text)) for n in range(1, longest + 1)}
