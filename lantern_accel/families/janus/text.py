"""Janus's prompts: the roles' names, the text, and where the image starts.

Source: deepseek-ai/Janus 1daa72f, ``generation_inference.py`` and ``janus/utils/conversation.py``. The
caller names the roles there, so that the two generations of models have two prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from lantern_accel.errors import CheckpointError
from lantern_accel.families.manifest import TokenIds
from lantern_accel.families.tokenizer import read_vocabulary

Variant = Literal["pro", "1.3b"]
ROLES: dict[Variant, tuple[str, str]] = {
    "pro": ("<|User|>", "<|Assistant|>"),
    "1.3b": ("User", "Assistant"),
}
START = "<begin_of_image>"
#: Names of the tokens that mean something. The bars are U+FF5C, the low lines U+2581.
NAMES = {
    "bos": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "pad": "<\uff5c\u2581pad\u2581\uff5c>",
    "image_start": START,
}


class JanusIds(TokenIds):
    """Ids of the tokens that mean something; the defaults are Janus-Pro-1B's."""

    bos: int = Field(100000, ge=0)
    pad: int = Field(100002, ge=0)
    image_start: int = Field(100003, ge=0)


def prompt_text(text: str, variant: Variant) -> str:
    """Return the prompt around a user's text."""
    user, assistant = ROLES[variant]
    return f"{user}: {text.strip()}\n\n{assistant}:{START}"


def read_ids(path: Path) -> JanusIds:
    """Read the ids off ``tokenizer.json``; raises :class:`CheckpointError` where one is absent."""
    known = read_vocabulary(path, "the tokenizer.json that comes with the model")
    for name in NAMES.values():
        if name not in known:
            raise CheckpointError(
                f"the tokenizer {path} lacks {name}, so it cannot prompt Janus for an image; use the "
                "tokenizer.json that comes with the model"
            )
    return JanusIds(**{field: known[name] for field, name in NAMES.items()})
