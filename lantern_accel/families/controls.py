"""Control strings: what a tokenizer reads as a token of its own, where a user wrote text.

The rule is the same for all families: a prompt with such a string is refused by name. Read as a
token it would end the text, begin an image or name a size, and the image would be of another prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lantern_accel.errors import RequestError, half_pair, show

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Names of tokens that no text makes: marks in brackets, bytes left out, and Chameleon's codes.
_NAME = re.compile(r"<(?!0x[0-9A-Fa-f]{2}>)[^<>\s]+>|\[[A-Za-z_]+\]|IMGIMG[A-J]+Z")


def _is_control(text: str, special: bool) -> bool:
    """Return whether an added token is one of control: files add letters and runs of spaces too."""
    if special or _NAME.fullmatch(text):
        return bool(text.strip())
    return len(text) > 1 and bool(re.search(r"\w", text) and re.search(r"[^\w\s]", text))


class Controls:
    """The control strings of one tokenizer (of ``tokenizers``), and ``marks``, those of its prompts."""

    def __init__(self, tokenizer: Tokenizer, marks: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        found = {
            number: str(one.content)
            for number, one in added.items()
            if _is_control(str(one.content), bool(one.special))
        }
        named = {i: name for name, i in tokenizer.get_vocab().items() if _NAME.fullmatch(name)}
        self._ids: dict[int, str] = {**named, **found}
        # Words that no vocabulary has become this token: it is not a sign of a control string.
        unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
        unwritten = None if unknown is None else self._ids.pop(unknown, None)
        strings = (*found.values(), *marks, *([] if unwritten is None else [unwritten]))
        self.strings = tuple(dict.fromkeys(strings))

    def find(self, text: str) -> str | None:
        """Return the first control string in a text, None where there is none.

        Ids are looked at too: a tokenizer may normalise before it looks for its tokens.
        """
        for one in self.strings:
            if one in text:
                return one
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return next((self._ids[i] for i in ids if i in self._ids), None)

    def check(self, texts: Iterable[str]) -> None:
        """Raise :class:`RequestError` for a text with a control string, by its name, and for no text."""
        for text in texts:
            if half_pair(text):
                raise RequestError(
                    f"the prompt {show(text)} holds half a surrogate pair and so is not text; "
                    "send text as UTF-8"
                )
            found = self.find(text)
            if found is not None:
                raise RequestError(
                    f"the prompt {show(text)} has {found!r} in it, which this model reads as a token "
                    f"of its own and not as text; leave it out, or write {apart(found)!r}"
                )


def apart(control: str) -> str:
    """Return a control string with a space behind its first sign, so that it is text."""
    return f"{control[:1]} {control[1:]}"
